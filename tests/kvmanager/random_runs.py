"""Settings of random Steps: short runs in `make test`, long ones in `make fuzz`."""

import os

from hypothesis import HealthCheck, Phase, settings


def random_runs(examples: int, steps: int) -> settings:
    """Return settings for `examples` runs of `steps` Steps; `make fuzz` has 3 times the runs and 5 times the Steps."""
    fuzz = "QUIRE_FUZZ" in os.environ
    return settings(
        max_examples=3 * examples if fuzz else examples,
        stateful_step_count=5 * steps if fuzz else steps,
        derandomize=settings().derandomize and not fuzz,
        deadline=None,
        print_blob=True,
        phases=[phase for phase in Phase if phase is not Phase.explain],  # which takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
