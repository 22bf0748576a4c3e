from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from services.wire.duration import MAX_SECONDS, checked_seconds_of, duration, seconds_of

SECONDS = st.floats(0, 1_000_000) | st.floats(0, MAX_SECONDS) | st.integers(0, MAX_SECONDS)


@given(SECONDS)
def test_seconds_round_trip_to_the_nanosecond_and_then_exactly(seconds: float) -> None:
    written = Duration.FromString(duration(seconds).SerializeToString())
    read = checked_seconds_of(written, "field")
    assert abs(read - seconds) <= 1e-9
    assert seconds_of(duration(read)) == read


def test_durations_are_clamped_to_their_range() -> None:
    assert duration(-1.0) == Duration()
    assert duration(1e300) == Duration(seconds=MAX_SECONDS)
    assert duration(0.999_999_999_9) == Duration(seconds=1)
