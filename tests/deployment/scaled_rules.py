"""Rules with all durations divided, so that alerts of hours fire within minutes. Other thresholds do not change."""

import re
from fractions import Fraction

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?P<before>\[|\bfor: |\boffset )(?P<count>\d+)(?P<unit>[smhd])(?=[\])]|$)", re.MULTILINE)
_WITHOUT_STEP = re.compile(r"(?P<before>quire_seconds_without_step > )(?P<count>\d+)")


def scaled(rules: str, divisor: int) -> str:
    """Divide the windows of queries, the `for` durations of alerts, and the seconds without a step."""
    rules = _WITHOUT_STEP.sub(lambda found: f"{found['before']}{int(found['count']) / divisor:g}", rules)
    return _DURATION.sub(lambda found: f"{found['before']}{_divided(found, divisor)}", rules)


def _divided(found: re.Match[str], divisor: int) -> str:
    seconds = Fraction(int(found["count"]) * _SECONDS[found["unit"]], divisor)
    return f"{int(seconds * 1000)}ms"
