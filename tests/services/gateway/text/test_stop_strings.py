from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.text.stop_strings import Released, StopStrings

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def told(stops: Sequence[str], include: bool, pieces: Sequence[str]) -> tuple[str, str | None]:
    """All the text that a client sees, and the stop string that ended it."""
    watch = StopStrings(stops, include)
    released = [watch.push(piece) for piece in pieces]
    return "".join(text for text, _ in released) + watch.finish(), released[-1].stop if released else None


def told_all_at_once(stops: Sequence[str], include: bool, text: str) -> tuple[str, str | None]:
    """The same by brute force: looks at each beginning of the text whether it ends with a stop string."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(stops=STOPS, include=st.booleans(), pieces=st.lists(LETTERS, min_size=1))
@example(stops=["aab", "ab"], include=False, pieces=["a", "aab"])
@example(stops=["abab", "b"], include=True, pieces=["aba", "b"])
def test_a_text_in_any_pieces_ends_where_a_plain_search_ends_it(
    stops: list[str], include: bool, pieces: list[str]
) -> None:
    assert told(stops, include, pieces) == told_all_at_once(stops, include, "".join(pieces))


@given(stops=STOPS, include=st.booleans(), text=LETTERS, before=st.integers(0, 30))
@example(stops=["aa"], include=False, text="aaaa", before=3)
@example(stops=["abab", "b"], include=True, text="abab", before=3)
def test_what_is_complete_where_the_text_may_not_end_yet_is_text(
    stops: list[str], include: bool, text: str, before: int
) -> None:
    watch = StopStrings(stops, include)
    released = [watch.push(letter, may_end=end > before) for end, letter in enumerate(text, start=1)]
    ends = [end for end in range(before + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    seen = "".join(piece for piece, _ in released) + watch.finish()
    if not ends:
        assert seen == text
        return
    stop = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    assert released[-1].stop == stop
    assert seen == text[: ends[0] if include else ends[0] - len(stop)]


@given(stops=STOPS, text=LETTERS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(stops: list[str], text: str) -> None:
    watch = StopStrings(stops, include=False)
    seen = ""
    for end, character in enumerate(text, start=1):
        released, stop = watch.push(character)
        if stop is not None:
            return
        seen += released
        beginnings = {stop[:length] for stop in stops for length in range(len(stop) + 1)}
        longest = max((len(start) for start in beginnings if text[:end].endswith(start)), default=0)
        assert seen == text[: end - longest]


def test_text_without_a_stop_string_passes_at_once() -> None:
    watch = StopStrings(["###"], include=False)
    assert [watch.push("Hello, "), watch.push("world")] == [("Hello, ", None), ("world", None)]
    assert watch.finish() == ""


def test_the_beginning_of_a_stop_string_waits_until_it_is_none() -> None:
    watch = StopStrings(["\n\nUser:"], include=False)
    assert watch.push("Hi.\n") == Released("Hi.", None)
    assert watch.push("\nUs") == Released("", None)
    assert watch.push("ually") == Released("\n\nUsually", None)


def test_a_stop_string_is_left_out_unless_wanted() -> None:
    assert StopStrings(["END"], include=False).push("the END of it") == Released("the ", "END")
    assert StopStrings(["END"], include=True).push("the END of it") == Released("the END", "END")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert told(["over the lazy", "the"], False, ["jumps over the lazy dog"]) == ("jumps over ", "the")


def test_of_two_stop_strings_complete_together_the_longer_wins() -> None:
    assert told(["the", "over the"], False, ["jumps over the lazy dog"]) == ("jumps ", "over the")


def test_nothing_is_told_after_the_end() -> None:
    watch = StopStrings(["."], include=True)
    assert watch.push("Yes. No") == Released("Yes.", ".")
    assert watch.push("Maybe") == Released("", ".")
    assert watch.finish() == ""


def test_a_text_that_ends_inside_a_stop_string_is_told_to_its_last_character() -> None:
    assert told(["stop"], False, ["please st", "o"]) == ("please sto", None)


def test_characters_special_to_regular_expressions_are_plain() -> None:
    assert told(["$", "^^", "|)"], False, ["a.(^b", "|", ")"]) == ("a.(^b", "|)")


def test_without_stop_strings_everything_passes() -> None:
    assert told([], False, ["a", "b"]) == ("ab", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""], include=False)


def test_many_long_stop_strings_that_almost_match_are_no_trouble() -> None:
    # A search that starts anew at each character would compare 64 * 1024 characters, each of 20,000 times.
    stops = ["a" * 512 + "b" + "a" * (511 - n) + "c" * n for n in range(64)]
    text = "a" * 20_000
    assert told(stops, False, [text, "b", "a" * 511]) == ("a" * 19_488, stops[0])
