"""Seconds as the wire's durations."""

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

# The most that a duration has, by its own documentation: some 10,000 years.
MOST_SECONDS = 315_576_000_000

_NANOSECOND = 1e-9


def duration(seconds: float) -> Duration:
    """Write a duration; what would be negative (an end before its beginning) is zero, what is too much is the most."""
    message = Duration()
    message.FromTimedelta(timedelta(seconds=min(max(0.0, seconds), MOST_SECONDS)))
    return message


def seconds_of(message: Duration) -> float:
    """Read a duration, also one that none can be: whoever reads it has to look at its bounds."""
    return float(message.seconds + message.nanos * _NANOSECOND)
