"""Calls whose arguments stand between tags, each on its own, such as `<parameter=city>Oslo</parameter>`."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.dialects.events import Event
from services.gateway.dialects.forms.call_form import Around, CallTarget, WrittenCall
from services.gateway.dialects.offered_tools import json_of
from services.gateway.dialects.scanner import Markers, Pass, Reading
from services.wire.requests.argument_texts import ArgumentTexts

_json = json.JSONEncoder(ensure_ascii=False).encode
_STRING = frozenset(("string",))


@dataclass(frozen=True)
class ParameterCalls:
    """`name` stands around the name of a tool, `key` around that of an argument, and `value` around its value.

    `end` follows the last argument; empty if the section of the call ends there. Values are plain text: the schema of
    the tool says which type they have, or, if `says_type`, an attribute after the key, `true` for a string. One line
    end on each side of a value belongs to the tags if `in_lines`. `indent` and `last` are what a model writes in front
    of an argument and after the last one.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    in_lines: bool = False
    says_type: bool = False
    indent: str = "\n"
    last: str = "\n"

    @property
    def marks(self) -> tuple[str, ...]:
        """See CallForm."""
        return (self.key[0], self.value[1])

    def read(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        scan = target.scan
        if not (yield from scan.expect(self.name[0])):
            return False
        yield from scan.skip()
        if (name := (yield from scan.one_of(target.tools.names))) is None:
            return False
        following = yield from scan.skip()
        first = self.name[1] or self.key[0]
        if following and not (yield from self._begins(target, first)):
            return False
        if target.tools.requires_arguments(name) and (yield from self._has_none(target)):
            return False
        target.start(name)
        yield from _Arguments(self, target, name).read()
        target.end()
        return True

    @property
    def argument_texts(self) -> ArgumentTexts:
        """See CallForm."""
        line = "\n" if self.in_lines else ""
        before_text, before_value = (
            f"{self.key[1]}{says}{self.value[0]}{line}"
            for says in (('true">', 'false">') if self.says_type else ("", ""))
        )
        after = line + self.value[1]
        return ArgumentTexts(self.indent + self.key[0], before_text, after, before_value, after)

    def around(self, name: str) -> Around:
        """See CallForm."""
        return Around(f"{self.name[0]}{name}{self.name[1]}", self.last + self.end)

    def passes(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        if not self.end or not (yield from target.scan.expect(self.name[0])):
            return False
        markers = Markers((self.end, target.closing))
        return (yield from target.scan.until(markers, lambda _: None)).marker == self.end

    def written(self, call: WrittenCall) -> str:
        """See CallForm."""
        around = "\n" if self.in_lines else ""
        parts = [f"{self.name[0]}{call.name}{self.name[1]}"]
        for key, value in json.loads(call.arguments).items():
            text = value if isinstance(value, str) else _json(value)
            says = f'{"true" if isinstance(value, str) else "false"}">' if self.says_type else ""
            parts.append(f"{self.indent}{self.key[0]}{key}{self.key[1]}{says}{self.value[0]}{around}{text}{around}")
            parts.append(self.value[1])
        return "".join([*parts, self.last, self.end])

    def _begins(self, target: CallTarget, first: str) -> Reading[bool]:
        """Return whether arguments, or the end of a call without any, follow. Reads the mark after the name."""
        if self.name[1]:
            return (yield from target.scan.expect(first))
        start, scan = target.scan.at, target.scan
        found = yield from scan.one_of((first, self.end or target.closing))
        scan.at = start
        return found is not None

    def _has_none(self, target: CallTarget) -> Reading[bool]:
        """Return whether the call, or the output, ends in front of the first argument."""
        following = yield from target.scan.skip()
        start = target.scan.at
        found = yield from target.scan.one_of((self.key[0], self.end or target.closing))
        target.scan.at = start
        return found != self.key[0] if found else not following


class _Arguments:
    """The arguments of the call that is being read, as the text of an object."""

    def __init__(self, form: ParameterCalls, target: CallTarget, tool: str) -> None:
        self._form = form
        self._target = target
        self._scan = target.scan
        self._tool = tool
        self._stop = form.end or target.closing

    def read(self) -> Reading[None]:
        """Emit the object. It stays open if the output ends within it."""
        begin = "{"
        while (found := (yield from self._next())) == self._form.key[0]:
            self._target.arguments(begin)
            begin = ", "
            if not (yield from self._argument()):
                return
        if found:
            if not self._form.end:
                self._scan.at -= len(found)
            self._target.arguments("{}" if begin == "{" else "}")

    def _next(self) -> Reading[str]:
        """Read up to the next argument or the end; return the mark of which it is, empty at the end of the output."""
        marks = (self._form.key[0], self._stop)
        return (yield from self._scan.until(Markers.of(marks), lambda _: None)).marker

    def _argument(self) -> Reading[bool]:
        key = yield from self._text_before(self._form.key[1])
        if key is None:
            return False
        types = self._target.tools.types(self._tool, key)
        if self._form.says_type:
            is_string = (yield from self._text_before('">')) == "true"
            types = _STRING if is_string else types - _STRING
        yield from self._value_mark()
        self._target.arguments(f"{_json(key)}: ")
        if types == _STRING:
            return (yield from self._string())
        parts: list[str] = []
        whole = yield from self._value(parts.append)
        if whole:
            self._target.arguments(json_of("".join(parts), types))
        return whole

    def _value_mark(self) -> Reading[None]:
        mark = self._form.value[0]
        if mark:
            yield from self._scan.skip()
            yield from self._scan.expect(mark)

    def _string(self) -> Reading[bool]:
        self._target.arguments('"')
        whole = yield from self._value(lambda part: self._target.arguments(_json(part)[1:-1]), self._passed_string)
        if whole:
            self._target.arguments('"')
        return whole

    def _passed_string(self, part: str) -> Event:
        return self._target.further(_json(part)[1:-1])

    def _text_before(self, mark: str) -> Reading[str | None]:
        parts: list[str] = []
        found = yield from self._scan.until(Markers.of((mark,)), parts.append)
        return "".join(parts) if found.marker else None

    def _value(self, emit: Callable[[str], None], passed: Callable[[str], Event] | None = None) -> Reading[bool]:
        """Emit a value without the line ends of its tags. Return whether it is whole.

        The mark after it may also be a part of it: only what follows the last one can follow a value. `passed` makes
        the event of a further part.
        """
        lines = _WithoutLines(emit) if self._form.in_lines else None
        add = lines.add if lines else emit
        close = self._form.value[1]
        markers = Markers.of((close,))
        passes = _passing(markers, passed, lines) if passed else None
        while (yield from self._scan.until(markers, add, keeps_blanks=True, drops_cut=True, passes=passes)).marker:
            start, self._scan.pinned = self._scan.at, True
            following = yield from self._scan.skip()
            ends = not following or (yield from self._scan.one_of((self._form.key[0], self._stop))) is not None
            ends = ends or self._is_cut_mark()
            self._scan.at, self._scan.pinned = start, False
            if ends:
                return True
            add(close)
        return False

    def _is_cut_mark(self) -> bool:
        """Return whether the end of the output cuts a mark that may follow a value."""
        rest = self._scan.available()
        return self._scan.ended and any(mark.startswith(rest) for mark in (self._form.key[0], self._stop))


def _passing(markers: Markers, event: Callable[[str], Event], lines: "_WithoutLines | None") -> Pass:
    """Pass pieces without markers, which neither end with whitespace nor stand next to a line end that is held."""
    passing = markers.passing(event)

    def passed(text: str) -> Event | None:
        return None if lines and not lines.pass_on else passing(text)

    return passed


class _WithoutLines:
    """Emits a text in parts without one line end at each of its ends."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._held = ""
        self._begun = False

    @property
    def pass_on(self) -> bool:
        """Whether a part that does not end with a line end is emitted as it is."""
        return self._begun and not self._held

    def add(self, part: str) -> None:
        """Add a part. A line end at its end waits for the next part."""
        if not self._begun and part:
            self._begun = True
            part = part.removeprefix("\n")
            if not part:
                return
        whole = self._held + part
        text = whole.removesuffix("\n")
        self._held = whole[len(text) :]
        if text:
            self._emit(text)
