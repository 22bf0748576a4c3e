"""Conversions between seconds and protobuf's Duration."""

from google.protobuf.duration_pb2 import Duration

from services.runtime.errors import InvalidField

# The largest value that Duration's documentation permits, about 10,000 years.
MAX_SECONDS = 315_576_000_000

_NANOSECONDS = 1_000_000_000


def duration(seconds: float) -> Duration:
    """Write a duration; negative values become zero, and values above the maximum become the maximum."""
    seconds = min(max(0.0, seconds), MAX_SECONDS)
    whole = int(seconds)
    more, nanos = divmod(round((seconds - whole) * _NANOSECONDS), _NANOSECONDS)
    return Duration(seconds=whole + more, nanos=nanos)


def seconds_of(message: Duration) -> float:
    """Read a duration without checking its bounds; the caller checks them."""
    return float(message.seconds + message.nanos / _NANOSECONDS)


def checked_seconds_of(message: Duration, field: str) -> float:
    """Read a duration. Raises InvalidField for values that Duration does not permit."""
    if not 0 <= message.seconds <= MAX_SECONDS or not 0 <= message.nanos < _NANOSECONDS:
        raise InvalidField(f"{field} must be a valid duration, not {message.seconds} s and {message.nanos} ns", field)
    return seconds_of(message)
