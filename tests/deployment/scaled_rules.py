"""The rules with all their durations divided, so that what takes hours happens within minutes.

Thresholds, and seconds that are no duration of PromQL, stay as they are.
"""

import re
from fractions import Fraction

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?P<before>\[|\bfor: )(?P<count>\d+)(?P<unit>[smhd])(?=\]|$)", re.MULTILINE)


def scaled(rules: str, divisor: int) -> str:
    """Divide the windows of queries, and how long alerts wait before they fire."""
    return _DURATION.sub(lambda found: f"{found['before']}{_divided(found, divisor)}", rules)


def _divided(found: re.Match[str], divisor: int) -> str:
    seconds = Fraction(int(found["count"]) * _SECONDS[found["unit"]], divisor)
    return f"{int(seconds * 1000)}ms"
