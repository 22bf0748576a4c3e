"""How long the random Steps go on: shortly among all tests, in longer runs by `make fuzz`."""

import os

from hypothesis import HealthCheck, Phase, settings


def random_runs(examples: int, steps: int) -> settings:
    """Return settings for so many runs of so many Steps; for `make fuzz`, five times as many Steps, anew each time."""
    fuzz = "QUIRE_FUZZ" in os.environ
    return settings(
        max_examples=examples,
        stateful_step_count=5 * steps if fuzz else steps,
        derandomize=settings().derandomize and not fuzz,
        deadline=None,
        print_blob=True,
        phases=[phase for phase in Phase if phase is not Phase.explain],  # which takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
