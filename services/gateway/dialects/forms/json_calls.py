"""Calls as JSON objects with a name and arguments."""

import json
from dataclasses import dataclass

from services.gateway.dialects.forms.call_form import NO_ARGUMENTS, Around, CallTarget, WrittenCall
from services.gateway.dialects.forms.json_text import loaded, read_value, stream_object
from services.gateway.dialects.scanner import Reading


@dataclass(frozen=True)
class JsonCalls:
    """An object such as `{"name": NAME, "arguments": {...}}`. The first argument key is the one to write.

    Arguments may also be the text of an object as a string. Without arguments, or with `null` or an empty string, they
    are an empty object, unless the tool requires some.
    """

    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments", "parameters")

    @property
    def marks(self) -> tuple[str, ...]:
        """See CallForm."""
        return (f'"{self.argument_keys[0]}',)

    def read(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        if not (yield from target.scan.expect("{")):
            return False
        return (yield from _Object(self, target).read())

    @property
    def argument_texts(self) -> None:
        """See CallForm."""

    def passes(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        if (yield from target.scan.peek()) != "{":
            return False
        value = loaded((yield from read_value(target.scan)) or "")
        return isinstance(value, dict) and self.name_key in value

    def around(self, name: str) -> Around:
        """See CallForm."""
        begin = f'{{"{self.name_key}": {json.dumps(name, ensure_ascii=False)}, "{self.argument_keys[0]}": '
        return Around(begin, "}")

    def written(self, call: WrittenCall) -> str:
        """See CallForm."""
        begin, end, _ = self.around(call.name)
        return f"{begin}{call.arguments}{end}"


class _Object:
    """The object that is being read."""

    def __init__(self, form: JsonCalls, target: CallTarget) -> None:
        self._form = form
        self._target = target
        self._scan = target.scan
        self._name = ""
        self._arguments = ""
        self._started = False

    def read(self) -> Reading[bool]:
        while (following := (yield from self._scan.skip(", \n\r\t"))) == '"':
            if not (yield from self._member()):
                return self._end()
        if following != "}":
            return self._end()
        self._scan.at += 1
        return self._end(whole=True)

    def _member(self) -> Reading[bool]:
        """Read a member; return False if there is none, or none that a call may have."""
        key = loaded((yield from self._scan.string()) or "")
        yield from self._scan.skip()
        if not (yield from self._scan.expect(":")):
            return False
        following = yield from self._scan.skip()
        if key in self._form.argument_keys and self._name and following == "{" and not self._started:
            self._started = True
            self._target.start(self._name)
            return (yield from stream_object(self._target, self._target.closing))
        text = yield from read_value(self._scan)
        if self._started:
            return text is not None  # whatever else it has
        if text is not None and key == self._form.name_key:
            name = loaded(text)
            self._name = name if isinstance(name, str) else ""
            return self._name in self._target.tools.names
        if text is not None and key in self._form.argument_keys:
            self._arguments = text
        return text is not None

    def _end(self, *, whole: bool = False) -> bool:
        if self._started:
            self._target.end()
            return True
        arguments = self._object() if whole and self._name in self._target.tools.names else None
        if arguments is None:
            return False
        self._target.start(self._name)
        self._target.arguments(arguments)
        self._target.end()
        return True

    def _object(self) -> str | None:
        """Return the arguments as the text of an object, None if there is none."""
        text = self._arguments
        if text.startswith('"') and isinstance(inner := loaded(text), str) and inner.strip():
            text = inner
        if text in ("", *NO_ARGUMENTS) or (text.startswith('"') and not str(loaded(text)).strip()):
            return None if self._target.tools.requires_arguments(self._name) else "{}"
        return text if isinstance(loaded(text), dict) else None
