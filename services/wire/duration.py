"""Seconds as the wire's durations."""

from google.protobuf.duration_pb2 import Duration

from services.runtime.errors import InvalidField

# The most that a duration has, by its own documentation: some 10,000 years.
MOST_SECONDS = 315_576_000_000

_NANOSECONDS = 1_000_000_000


def duration(seconds: float) -> Duration:
    """Write a duration; what would be negative (an end before its beginning) is zero, what is too much is the most."""
    seconds = min(max(0.0, seconds), MOST_SECONDS)
    whole = int(seconds)
    more, nanos = divmod(round((seconds - whole) * _NANOSECONDS), _NANOSECONDS)
    return Duration(seconds=whole + more, nanos=nanos)


def seconds_of(message: Duration) -> float:
    """Read a duration, also one that none can be: whoever reads it has to look at its bounds."""
    return float(message.seconds + message.nanos / _NANOSECONDS)


def checked_seconds_of(message: Duration, field: str) -> float:
    """Read a duration. Raises InvalidField for one that none can be."""
    if not 0 <= message.seconds <= MOST_SECONDS or not 0 <= message.nanos < _NANOSECONDS:
        raise InvalidField(f"{field} is {message.seconds} s and {message.nanos} ns, which is no duration", field)
    return seconds_of(message)
