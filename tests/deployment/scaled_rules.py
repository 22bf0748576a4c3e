"""Rules with all durations divided, so that alerts of hours fire within minutes. Thresholds do not change."""

import re
from fractions import Fraction

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?P<before>\[|\bfor: )(?P<count>\d+)(?P<unit>[smhd])(?=\]|$)", re.MULTILINE)


def scaled(rules: str, divisor: int) -> str:
    """Divide the windows of queries and the `for` durations of alerts."""
    return _DURATION.sub(lambda found: f"{found['before']}{_divided(found, divisor)}", rules)


def _divided(found: re.Match[str], divisor: int) -> str:
    seconds = Fraction(int(found["count"]) * _SECONDS[found["unit"]], divisor)
    return f"{int(seconds * 1000)}ms"
