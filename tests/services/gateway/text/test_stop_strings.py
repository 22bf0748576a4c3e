from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.text.stop_strings import ReleasedText, StopStringMatcher

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def matched(stops: Sequence[str], include: bool, pieces: Sequence[str]) -> tuple[str, str | None]:
    """Return the released text and the stop string that ended it."""
    matcher = StopStringMatcher(stops, include)
    released = [matcher.push(piece) for piece in pieces]
    return "".join(text for text, _ in released) + matcher.finish(), released[-1].stop if released else None


def matched_by_brute_force(stops: Sequence[str], include: bool, text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(stops=STOPS, include=st.booleans(), pieces=st.lists(LETTERS, min_size=1))
@example(stops=["aab", "ab"], include=False, pieces=["a", "aab"])
@example(stops=["abab", "b"], include=True, pieces=["aba", "b"])
def test_any_split_of_a_text_ends_at_the_same_stop_string_as_a_brute_force_search(
    stops: list[str], include: bool, pieces: list[str]
) -> None:
    assert matched(stops, include, pieces) == matched_by_brute_force(stops, include, "".join(pieces))


@given(stops=STOPS, include=st.booleans(), text=LETTERS, before=st.integers(0, 30))
@example(stops=["aa"], include=False, text="aaaa", before=3)
@example(stops=["abab", "b"], include=True, text="abab", before=3)
def test_a_stop_string_completed_before_the_text_may_end_is_plain_text(
    stops: list[str], include: bool, text: str, before: int
) -> None:
    matcher = StopStringMatcher(stops, include)
    released = [matcher.push(letter, may_end=end > before) for end, letter in enumerate(text, start=1)]
    ends = [end for end in range(before + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    seen = "".join(piece for piece, _ in released) + matcher.finish()
    if not ends:
        assert seen == text
        return
    stop = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    assert released[-1].stop == stop
    assert seen == text[: ends[0] if include else ends[0] - len(stop)]


@given(stops=STOPS, text=LETTERS)
def test_only_a_prefix_of_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(stops, include=False)
    seen = ""
    for end, character in enumerate(text, start=1):
        released, stop = matcher.push(character)
        if stop is not None:
            return
        seen += released
        prefixes = {stop[:length] for stop in stops for length in range(len(stop) + 1)}
        longest = max((len(prefix) for prefix in prefixes if text[:end].endswith(prefix)), default=0)
        assert seen == text[: end - longest]


def test_nothing_is_released_after_a_stop_string() -> None:
    matcher = StopStringMatcher(["."], include=True)
    assert matcher.push("Yes. No") == ReleasedText("Yes.", ".")
    assert matcher.push("Maybe") == ReleasedText("", ".")
    assert matcher.finish() == ""


def test_characters_special_to_regular_expressions_are_plain() -> None:
    assert matched(["$", "^^", "|)"], False, ["a.(^b", "|", ")"]) == ("a.(^b", "|)")


def test_an_empty_stop_string_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStringMatcher(["a", ""], include=False)


def test_many_long_stop_strings_that_almost_match_cost_linear_time() -> None:
    # A search that restarts at each character would compare 64 * 1024 characters 20,000 times.
    stops = ["a" * 512 + "b" + "a" * (511 - n) + "c" * n for n in range(64)]
    text = "a" * 20_000
    assert matched(stops, False, [text, "b", "a" * 511]) == ("a" * 19_488, stops[0])
