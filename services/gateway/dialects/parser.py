"""The parser of all dialects: the text of one sample, in any pieces, becomes events."""

from collections import Counter
from enum import Enum
from functools import partial

from services.gateway.dialects.channels import ChannelReader
from services.gateway.dialects.dialect import CallFormat, Dialect, ThoughtFormat
from services.gateway.dialects.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text
from services.gateway.dialects.forms.call_form import CallTarget
from services.gateway.dialects.forms.json_text import loaded
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.scanner import Found, Markers, Reading, Scanner

_NO_TOOLS = OfferedTools({})
_BLANKS = " \t\r\n"
# Openings that are tried at the end of an output, where each may lead through the whole rest.
_MOST_TRIED_AT_END = 32


_new = tuple.__new__  # of events that pass, in half the time of their constructors


class ParseFailure(Enum):
    """What an output has instead of a call. The values are labels of metrics."""

    NO_CALL = "no-call"  # an opening mark, and no call of an offered tool behind it
    ARGUMENTS = "arguments"  # a call whose arguments are no JSON object
    CUT = "cut"  # a call that the end of the output cuts


class DialectParser:
    """Parses one sample. Its events do not depend on where the text was cut.

    What follows an opening mark is a call as soon as it names an offered tool and its arguments begin. Otherwise the
    mark and what follows are text. Whitespace next to thoughts and calls is no text.
    """

    def __init__(
        self,
        dialect: Dialect,
        tools: OfferedTools = _NO_TOOLS,
        *,
        in_thought: bool = False,
        is_constrained: bool = False,
        is_held: bool = False,
        drops_text: bool = False,
    ) -> None:
        """`in_thought`: the prompt has begun a thought.

        `is_constrained`: the answer follows a constraint, so that marks of thoughts in it are text. `is_held`: a
        grammar holds the output to calls or an answer, so that an opening mark without a call is a call that the end of
        the output cuts, and no text. `drops_text`: it holds the output to calls alone.
        """
        self._is_constrained = is_constrained
        self._is_held = is_held
        self._tried_at_end = 0
        self._is_fresh = True  # no text yet, or none since a thought or call
        self._drops_text = drops_text
        self._scan = Scanner()
        self._events: list[Event] = []
        self.failures: Counter[ParseFailure] = Counter()
        self._arguments: list[str] = []
        self.calls = 0
        """Number of calls that have begun."""
        self._dialect = dialect
        self._tools = tools
        if dialect.channels:
            self._reading = ChannelReader(dialect.channels, self._target(""), drops_text=drops_text).read()
        else:
            self._reading = self._read(in_thought=in_thought and dialect.thought is not None)
        self._advance()

    @property
    def calls_name(self) -> str:
        """The name of the format of calls, empty without one."""
        return self._dialect.calls.name if self._dialect.calls else ""

    @property
    def thinks(self) -> bool:
        """Whether the output may have thoughts."""
        return self._dialect.thought is not None

    def push(self, text: str) -> list[Event]:
        """Add generated text; return the events that are certain."""
        if event := self.passed(text):
            return [event]
        if text:
            self._scan.push(text)
            self._advance()
        return self._taken()

    def passed(self, text: str) -> Event | None:
        """Add a text that is one event, and return it. None, and nothing is added, for other texts: push them."""
        passes = self._scan.passes
        if not passes or not text:
            return None
        if (event := passes(text)) is None:
            self._scan.passes = None  # it has looked at this text, which now needs the reader
        return event

    def finish(self) -> list[Event]:
        """Return the events that were held back, at the end of the output."""
        if not self._scan.ended:
            self._scan.ended = True
            self._advance()
        return self._taken()

    def _advance(self) -> None:
        self._scan.passes = None
        next(self._reading, None)

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _emit(self, event: Event) -> None:
        if self._drops_text and isinstance(event, Text):
            return
        self._events.append(event)
        match event:
            case CallStart():
                self.calls += 1
                self._arguments.clear()
            case Arguments(text):
                self._arguments.append(text)
            case CallEnd() if not isinstance(loaded("".join(self._arguments)), dict):
                self.failures[ParseFailure.CUT if self._scan.ended else ParseFailure.ARGUMENTS] += 1

    def _text(self, text: str) -> None:
        self._is_fresh = False
        self._emit(Text(text))

    def _passed_text(self, text: str) -> Text:
        self._is_fresh = False
        return _new(Text, (text,))

    def _passed_arguments(self, text: str) -> Arguments:
        self._arguments.append(text)
        return _new(Arguments, (text,))

    def _target(self, closing: str) -> CallTarget:
        return CallTarget(self._scan, self._tools, self._emit, self._passed_arguments, closing)

    @property
    def _calls(self) -> CallFormat | None:
        return self._dialect.calls if self._tools.names else None

    def _read(self, *, in_thought: bool) -> Reading[None]:
        """Read the whole output."""
        thought, calls = self._dialect.thought, self._calls
        if thought and (in_thought or (yield from self._begins(thought))):
            yield from self._thought(thought)
        if calls and not calls.opening and (yield from self._bare(calls)):
            yield from self._scan.skip()
        marks = (thought.start, thought.end, *thought.frames) if thought and not self._is_constrained else ()
        yield from self._answer(Markers.of((*marks, *(calls.openings if calls else ()))))

    def _begins(self, thought: ThoughtFormat) -> Reading[bool]:
        """Return whether the output begins with a thought, and read its mark."""
        self._scan.pinned = True
        yield from self._scan.skip()
        found = yield from self._scan.expect(thought.start)
        self._scan.pinned = False
        if not found:
            self._scan.at = 0
        return found

    def _answer(self, markers: Markers) -> Reading[None]:
        """Read text with calls in it, and thoughts behind them. Elsewhere, the marks of thoughts are text."""
        calls, framed = self._calls, False
        frames = self._dialect.thought.frames if self._dialect.thought else ()
        passes = None if self._drops_text else markers.passing(self._passed_text)
        read = partial(self._scan.until, markers, self._text, drops_cut=self._is_held, passes=passes)
        while (found := (yield from read())).marker:
            if calls and found.marker in calls.openings:
                if not (yield from self._called(calls, found)):
                    return
            elif self._is_fresh or (framed and found.marker in frames):
                framed = found.marker in frames or framed
                yield from self._between(found.marker)
            else:
                self._text(found.before + found.marker)

    def _between(self, marker: str) -> Reading[None]:
        """Read what a mark of a thought, where one may stand, is followed by."""
        thought = self._dialect.thought
        if thought and marker == thought.start:
            yield from self._thought(thought)
        else:
            yield from self._scan.skip("\n")

    def _called(self, calls: CallFormat, found: Found) -> Reading[bool]:
        """Read the calls behind an opening mark, or take it as text. Return False if the rest of the output is read."""
        if (yield from self._section(calls, found.before + found.marker)):
            self._is_fresh = True
            yield from self._scan.skip()
        elif self._is_held:
            self.failures[ParseFailure.CUT] += 1
            self._scan.drop_rest()
            return False
        else:
            self.failures[ParseFailure.NO_CALL] += 1
            self._text(found.before + found.marker)
            return self._goes_on()
        return True

    def _goes_on(self) -> bool:
        """Return whether to try further openings, and pass the rest on as text if not."""
        self._tried_at_end += self._scan.ended
        if self._tried_at_end <= _MOST_TRIED_AT_END:
            return True
        self._text(self._scan.available())
        self._scan.drop_rest()
        return False

    def _thought(self, thought: ThoughtFormat) -> Reading[None]:
        """Read a thought up to its end, or to a call in it."""
        calls = None if self._is_constrained else self._calls
        markers = Markers.of((thought.end, thought.start, *(calls.openings if calls else ())))
        yield from self._scan.skip("\n")
        passes = markers.passing(_passed_reasoning)
        read = partial(
            self._scan.until, markers, lambda text: self._emit(Reasoning(text)), drops_cut=True, passes=passes
        )
        while (found := (yield from read())).marker:
            if found.marker == thought.end:
                yield from self._scan.skip("\n")
                return
            if found.marker == thought.start:
                yield from self._scan.skip("\n")
                continue
            if calls and (yield from self._section(calls, found.marker)):
                yield from self._scan.skip()
                return
            self._emit(Reasoning(found.before + found.marker))
            if not self._goes_on():
                return

    def _bare(self, calls: CallFormat) -> Reading[bool]:
        """Read calls at the beginning of the answer. Without any, go back to it."""
        start, self._scan.pinned = self._scan.at, True
        yield from self._scan.skip()
        yield from self._scan.one_of(calls.prefixes)
        if (yield from self._section(calls)):
            return True
        self._scan.at = start
        return False

    def _section(self, calls: CallFormat, opened: str = "") -> Reading[bool]:
        """Read the calls after an opening mark. Without any, go back to it and return False.

        Calls of other tools in front of one are text, with the mark that `opened` the section.
        """
        scan, target = self._scan, self._target(calls.closing or calls.opening)
        behind, read = scan.at, 0  # the last call, or the mark
        passed = behind
        while calls.repeats or not read:
            scan.pinned = True
            yield from scan.skip(calls.separators + _BLANKS)
            start = scan.at
            if (yield from calls.read(target)):
                self._count_passed(target)
                behind, read = scan.at, read + 1
            elif opened and calls.repeats and (yield from calls.form.passes(target)):
                passed = start if read and not target.passed else passed
                target.passed = opened * (not read) + scan.since(passed)
            else:
                break
        scan.at, scan.pinned = behind, False
        if not read:
            return False
        if self._is_held and scan.ended and scan.available().strip() != calls.closing:
            scan.drop_rest()  # a call that the end cuts
        else:
            yield from self._close(calls)
        return True

    def _count_passed(self, target: CallTarget) -> None:
        if target.passed:
            self.failures[ParseFailure.NO_CALL] += 1
            target.passed = ""

    def _close(self, calls: CallFormat) -> Reading[None]:
        """Read what closes a section, or go back to what stands there instead."""
        start, self._scan.pinned = self._scan.at, True
        yield from self._scan.skip()
        if calls.closing:
            yield from self._scan.skip(calls.separators + _BLANKS)
        if not (yield from self._scan.expect(calls.closing or "]" * ("]" in calls.separators))):
            rest = self._scan.available()
            is_cut = bool(rest) and self._scan.ended and calls.closing.startswith(rest)
            self._scan.at = start + is_cut * len(self._scan.since(start) + rest)
        self._scan.pinned = False


def _passed_reasoning(text: str) -> Reasoning:
    return _new(Reasoning, (text,))
