"""The parser of all dialects: the text of one sample, in any pieces, becomes events."""

from collections import Counter
from enum import Enum

from services.gateway.dialects.channels import ChannelReader
from services.gateway.dialects.dialect import CallFormat, Dialect, ThoughtFormat
from services.gateway.dialects.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text
from services.gateway.dialects.forms.call_form import CallTarget
from services.gateway.dialects.forms.json_text import loaded
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.scanner import Markers, Reading, Scanner

_NO_TOOLS = OfferedTools({})
_BLANKS = " \t\r\n"


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
        drops_text: bool = False,
    ) -> None:
        """`in_thought`: the prompt has begun a thought. `drops_text`: the output is held to calls.

        Such an output has text only where its end cuts a call before its arguments.
        """
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
            self._reading = ChannelReader(dialect.channels, self._target("")).read()
        else:
            self._reading = self._read(in_thought=in_thought and dialect.thought is not None)
        self._advance()

    @property
    def dialect_name(self) -> str:
        """The name of the dialect."""
        return self._dialect.name

    @property
    def thinks(self) -> bool:
        """Whether the output may have thoughts."""
        return self._dialect.thought is not None

    def push(self, text: str) -> list[Event]:
        """Add generated text; return the events that are certain."""
        if text:
            self._scan.push(text)
            self._advance()
        return self._taken()

    def finish(self) -> list[Event]:
        """Return the events that were held back, at the end of the output."""
        if not self._scan.ended:
            self._scan.ended = True
            self._advance()
        return self._taken()

    def _advance(self) -> None:
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
        self._emit(Text(text))

    def _target(self, closing: str) -> CallTarget:
        return CallTarget(self._scan, self._tools, self._emit, closing)

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
        marks = (thought.start, thought.end, *thought.frames) if thought else ()
        yield from self._answer(Markers((*marks, *(calls.openings if calls else ()))))

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
        """Read text with thoughts and calls in it."""
        thought, calls = self._dialect.thought, self._calls
        while (found := (yield from self._scan.until(markers, self._text))).marker:
            if thought and found.marker == thought.start:
                yield from self._thought(thought)
            elif thought and found.marker in (thought.end, *thought.frames):
                yield from self._scan.skip("\n")
            elif calls and (yield from self._section(calls)):
                yield from self._scan.skip()
            else:
                self.failures[ParseFailure.NO_CALL] += 1
                self._text(found.before + found.marker)

    def _thought(self, thought: ThoughtFormat) -> Reading[None]:
        """Read a thought up to its end, or to a call in it."""
        calls = self._calls if thought.end_at_calls else None
        markers = Markers((thought.end, thought.start, *(calls.openings if calls else ())))
        yield from self._scan.skip("\n")
        while (found := (yield from self._scan.until(markers, lambda part: self._emit(Reasoning(part))))).marker:
            if found.marker == thought.end:
                yield from self._scan.skip("\n")
                return
            if found.marker == thought.start:
                yield from self._scan.skip("\n")
                continue
            if calls and (yield from self._section(calls)):
                yield from self._scan.skip()
                return
            self._emit(Reasoning(found.before + found.marker))

    def _bare(self, calls: CallFormat) -> Reading[bool]:
        """Read calls at the beginning of the answer. Without any, go back to it."""
        start, self._scan.pinned = self._scan.at, True
        yield from self._scan.skip()
        yield from self._scan.one_of(calls.prefixes)
        if (yield from self._section(calls)):
            return True
        self._scan.at = start
        return False

    def _section(self, calls: CallFormat) -> Reading[bool]:
        """Read the calls after an opening mark. Without any, go back to it and return False."""
        scan, target = self._scan, self._target(calls.closing)
        begin, read = scan.at, 0
        while calls.repeats or not read:
            start, scan.pinned = scan.at, True
            yield from scan.skip(calls.separators + _BLANKS)
            if not (yield from calls.read(target)):
                scan.at = start
                break
            read += 1
        scan.pinned = False
        if not read:
            scan.at = begin
        else:
            yield from self._close(calls)
        return read > 0

    def _close(self, calls: CallFormat) -> Reading[None]:
        """Read what closes a section, or go back to what stands there instead."""
        start, self._scan.pinned = self._scan.at, True
        yield from self._scan.skip()
        if calls.closing:
            yield from self._scan.skip(calls.separators + _BLANKS)
        if not (yield from self._scan.expect(calls.closing or "]" * ("]" in calls.separators))):
            self._scan.at = start
        self._scan.pinned = False
