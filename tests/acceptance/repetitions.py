"""How often acceptance tests repeat a fault: a fifth of the times, unless `make acceptance LONG=1` wants all."""

import os

LONG = os.environ.get("QUIRE_LONG", "") not in ("", "0")
_PART = 5


def repetitions(all_of_them: int) -> int:
    """Return how many of the repetitions of a long run this run makes, at least one."""
    return all_of_them if LONG else max(1, all_of_them // _PART)
