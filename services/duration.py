"""Seconds as the wire's durations."""

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration


def duration(seconds: float) -> Duration:
    """Write a duration; what would be negative (an end before its beginning) is zero."""
    message = Duration()
    message.FromTimedelta(timedelta(seconds=max(0.0, seconds)))
    return message
