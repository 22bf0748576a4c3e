"""The parts of each call, with their seconds. The last part of a call takes what the others leave."""

CALLS: dict[int, dict[str, float]] = {
    # Whether it works at all: versions, a launch of each kind, exact results, a real start.
    1: {"machine": 60.0, "smoke": 80.0, "exactness": 110.0, "start": 170.0, "sanitizer": 120.0},
    # How fast it is as committed.
    2: {"ceilings": 25.0, "llama": 165.0, "sampler": 80.0, "decode": 120.0, "prefill": 90.0, "copies": 60.0},
    # What would be faster, and why.
    3: {"sweep": 150.0, "tunings": 150.0, "counters": 90.0, "tests": 150.0},
}
