"""What a difference looks like: conditions on a text and on what both parsers find in it.

An explanation names one, so that it cannot hide another difference of the same texts.
"""

from collections.abc import Callable
from typing import NamedTuple

from bench.dialects.readings import OutputReading, same_value
from bench.dialects.texts import SCHEMAS, DialectText

UNKNOWN = "look_down"
_CUT = ['{"word": "a long w']


class Comparison(NamedTuple):
    """A text, and what Quire and vLLM find in it."""

    sample: DialectText
    ours: OutputReading
    theirs: OutputReading

    @property
    def before(self) -> str:
        """The text in front of the first mark of a call."""
        opening = self.sample.profile.calls.opening
        return self.sample.text.partition(opening)[0].strip() if opening else ""

    @property
    def whole(self) -> str:
        """The text without whitespace at its ends, and without the thought that both find."""
        mark = self.sample.profile.thought.end
        return self.sample.text.partition(mark)[2].strip() if self.sample.thinks else self.sample.text.strip()


Shape = Callable[[Comparison], bool]


def text_before_only(case: Comparison) -> bool:
    """vLLM passes on the text in front of the first mark, and none behind it."""
    return case.theirs.content == case.before != case.ours.content and case.ours.content.startswith(case.before)


def no_text(case: Comparison) -> bool:
    """vLLM passes on no text, and Quire does."""
    return not case.theirs.content and bool(case.ours.content)


def blank_lines(case: Comparison) -> bool:
    """The texts differ in whitespace only."""
    return case.theirs.content.split() == case.ours.content.split()


def text_outside_only(case: Comparison) -> bool:
    """vLLM passes on the first and the last line of the text, and not what stands between the calls."""
    lines = case.ours.content.split("\n")
    return case.theirs.content == f"{lines[0]}\n{lines[-1]}"


def first_section_only(case: Comparison) -> bool:
    """vLLM finds the calls of the first section, and Quire those of both."""
    return len(case.ours.calls) == 2 and case.theirs.calls == case.ours.calls[:1]


def mark_dropped(case: Comparison) -> bool:
    """vLLM passes on the text without the mark of a call, and Quire the whole text."""
    text = case.sample.text.replace(case.sample.profile.calls.opening, "")
    return case.theirs.content.split() == text.split() and case.ours.content == case.whole


def text_behind_mark_only(case: Comparison) -> bool:
    """vLLM passes on what follows the mark, up to the next one."""
    mark = case.sample.profile.calls.opening
    return case.theirs.content == case.whole.partition(mark)[2].partition(mark)[0].strip()


def invented_calls(case: Comparison) -> bool:
    """vLLM finds a call of a tool that no text names, and Quire does not."""
    invented = set(case.theirs.names) - {*SCHEMAS, UNKNOWN}
    return bool(invented) and not set(case.ours.names) - set(SCHEMAS)


def unknown_called(case: Comparison) -> bool:
    """Both find the offered tool; vLLM finds the other one, too, which is text to Quire."""
    return (
        case.theirs.names == [UNKNOWN, "look_up"]
        and case.ours.names == ["look_up"]
        and case.theirs.content == ""
        and UNKNOWN in case.ours.content
    )


def unknown_dropped(case: Comparison) -> bool:
    """vLLM finds the offered tool alone; Quire too, and passes the other one on as text."""
    return case.theirs.names == case.ours.names == ["look_up"] and not case.theirs.content and UNKNOWN in case.whole


def all_text(case: Comparison) -> bool:
    """vLLM finds calls of both tools, and Quire takes the whole text as text."""
    return case.theirs.names == [UNKNOWN, "look_up"] and not case.ours.calls and case.ours.content == case.whole


def cut_empty(case: Comparison) -> bool:
    """The arguments of the cut call are an empty object to vLLM, and to Quire the text up to the cut."""
    theirs, ours = case.theirs.arguments, case.ours.arguments
    return theirs[:-1] == ours[:-1] and theirs[-1] == {} and ours[-1] == _CUT


def cut_dropped(case: Comparison) -> bool:
    """vLLM drops the cut call, and Quire passes on its arguments up to the cut."""
    return case.theirs.calls == case.ours.calls[:-1] and case.ours.arguments[-1] == _CUT


def cut_completed(case: Comparison) -> bool:
    """vLLM passes the cut call on as if it was whole, and to Quire it is text."""
    first, then = case.theirs.calls
    whole = first[0] == then[0] == "look_up" and isinstance(then[1], dict)
    return whole and len(case.ours.calls) == 1 and "a long w" in case.ours.content and not case.theirs.content


def nothing_called(case: Comparison) -> bool:
    """vLLM finds no call, and takes the whole text as text; Quire finds calls."""
    return not case.theirs.calls and case.theirs.content == case.whole and bool(case.ours.calls)


def nothing_called_behind_mark(case: Comparison) -> bool:
    """The same, without the first mark."""
    return not case.theirs.calls and text_behind_mark_only(case) and bool(case.ours.calls)


def nothing_at_all(case: Comparison) -> bool:
    """vLLM finds neither calls nor text, and Quire finds calls."""
    return not case.theirs.calls and not case.theirs.content and bool(case.ours.calls)


def found_in_text(case: Comparison) -> bool:
    """vLLM finds calls in text that Quire passes on whole."""
    return bool(case.theirs.calls) and not case.ours.calls and case.ours.content == case.whole


def null_arguments(case: Comparison) -> bool:
    """The arguments of the call without any are `null` or no text to vLLM, and an empty object to Quire."""
    pairs = list(zip(case.theirs.arguments, case.ours.arguments, strict=True))
    return all(theirs == ours or (theirs in (None, [""]) and ours == {}) for theirs, ours in pairs)


def bare_values_dropped(case: Comparison) -> bool:
    """vLLM finds the string arguments alone, as what they are in JSON, and Quire all of them."""
    pairs = list(zip(case.theirs.arguments, case.ours.arguments, strict=True))
    own = all(key in ("word", "note", "b") for theirs, _ in pairs for key in theirs)
    return own and any(len(theirs) < len(ours) for theirs, ours in pairs)


def converted(case: Comparison) -> bool:
    """vLLM makes null of the string `null`, and may make strings of nested values; Quire keeps what the model wrote."""
    [theirs], [ours] = case.theirs.arguments, case.ours.arguments
    differing = {key for key in ours if not same_value(theirs[key], ours[key])}
    return differing <= {"note", "options"} and theirs["note"] is None and ours["note"] == "null"


def marks_end_arguments(case: Comparison) -> bool:
    """The arguments end, or are changed, at a mark within a string for vLLM; Quire has them whole."""
    [theirs], [ours] = case.theirs.arguments, case.ours.arguments
    return case.sample.profile.calls.opening in ours["word"] and (
        isinstance(theirs, list) or ours["word"] != theirs["word"]
    )


def argument_ended_by_next(case: Comparison) -> bool:
    """An argument without its last mark ends at the next one for vLLM; for Quire it has the next one in it."""
    [theirs], [ours] = case.theirs.arguments, case.ours.arguments
    return set(theirs) == {"word", "count"} and set(ours) == {"word"} and ours["word"].startswith(theirs["word"])


def more_arguments(case: Comparison) -> bool:
    """To vLLM the broken arguments go on up to the end of the section; to Quire up to their last brace."""
    [[theirs]], [[ours]] = case.theirs.arguments, case.ours.arguments
    return bool(theirs.startswith(ours))


def evaluated(case: Comparison) -> bool:
    """vLLM computes `-+1`, and Quire takes a call with it as text."""
    [arguments] = case.theirs.arguments
    return isinstance(arguments["count"], int) and not case.ours.calls and case.ours.content == case.whole


def call_in_thought(case: Comparison) -> bool:
    """To vLLM the call is a part of the thought, and to Quire it ends the thought."""
    return not case.theirs.calls and case.theirs.thought.startswith(case.ours.thought) and len(case.ours.calls) == 1


def thought_as_text(case: Comparison) -> bool:
    """vLLM passes the thought on as text, with its mark, and Quire as a thought."""
    text = f"{case.sample.profile.thought.start}\n{case.ours.thought}"
    return not case.theirs.thought and case.theirs.content == text and not case.ours.content


def thought_dropped(case: Comparison) -> bool:
    """vLLM passes on the call alone, and Quire the thought too."""
    return not case.theirs.thought and not case.theirs.content and bool(case.ours.thought)


def failed(case: Comparison) -> bool:
    """VLLM's parser raises an error, and Quire finds text or calls."""
    return bool(case.theirs.error and (case.ours.calls or case.ours.content == case.whole))
