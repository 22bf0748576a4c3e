"""Calls as a name and a JSON object, with marks around them."""

from dataclasses import dataclass

from services.gateway.dialects.forms.call_form import NO_ARGUMENTS, Around, CallTarget, WrittenCall
from services.gateway.dialects.forms.json_text import read_value, stream_object
from services.gateway.dialects.scanner import Markers, Reading


@dataclass(frozen=True)
class NamedCalls:
    """`before` NAME `between` {...} `after`.

    `prefix` may stand in front of the name. `numbers`: the prefix, the name, a colon and a number are the call's id.
    `id_mark` and an id may follow the name. A `between` that is `optional` may be left out. Without arguments, or with
    `null` or an empty string, they are an empty object, unless the tool requires some.
    """

    before: str
    between: str
    after: str
    prefix: str = ""
    numbers: bool = False
    id_mark: str = ""
    optional: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """See CallForm."""
        return (self.between.strip(),)

    def read(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        scan = target.scan
        if not (yield from scan.expect(self.before)):
            return False
        yield from scan.skip()
        prefixed = bool(self.prefix) and (yield from scan.expect(self.prefix))
        if (name := (yield from scan.one_of(target.tools.names))) is None:
            return False
        call_id = yield from self._id(target, name, prefixed)
        if self.between.strip():
            yield from scan.skip()
        if not ((yield from scan.expect(self.between.strip())) or self.optional):
            return False
        if (yield from scan.skip()) == "{":
            target.start(name, call_id)
            yield from stream_object(target, self.after.strip() or target.closing)
        elif (yield from self._has_none(target)) and not target.tools.requires_arguments(name):
            target.start(name, call_id)
            target.arguments("{}")
        else:
            return False
        yield from scan.skip()
        yield from scan.expect(self.after.strip())
        target.end()
        return True

    @property
    def argument_texts(self) -> None:
        """See CallForm."""

    def _has_none(self, target: CallTarget) -> Reading[bool]:
        """Read what may stand in place of arguments. Return whether the call ends behind it."""
        scan, after = target.scan, self.after.strip()
        written = yield from scan.one_of(NO_ARGUMENTS)
        following = yield from scan.skip()
        if not after and not following:
            return written is not None
        start = scan.at
        ends = yield from scan.expect(after or target.closing)
        scan.at = start
        return ends and bool(after or written)

    def passes(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        scan = target.scan
        if not self.before or not (yield from scan.expect(self.before)):
            return False
        between, after = self.between.strip(), self.after.strip()
        if (yield from scan.until(Markers((between, after, target.closing)), lambda _: None)).marker != between:
            return False
        if (yield from scan.skip()) != "{" or (yield from read_value(scan)) is None:
            return False
        yield from scan.skip()
        return (yield from scan.expect(after))

    def around(self, name: str) -> Around:
        """See CallForm."""
        begin = self.before + self.prefix + name
        return (
            Around(f"{begin}:", self.after, self.between) if self.numbers else Around(begin + self.between, self.after)
        )

    def written(self, call: WrittenCall) -> str:
        """See CallForm."""
        name = call.id if self.numbers and call.id else self.prefix + call.name
        marked = f"{self.id_mark}{call.id}" if self.id_mark and call.id else ""
        return f"{self.before}{name}{marked}{self.between}{call.arguments}{self.after}"

    def _id(self, target: CallTarget, name: str, prefixed: bool) -> Reading[str]:
        scan = target.scan
        if self.numbers and (yield from scan.expect(":")):
            start = scan.at
            yield from scan.skip("0123456789")
            return f"{self.prefix * prefixed}{name}:{scan.since(start)}"
        if self.id_mark and (yield from scan.expect(self.id_mark)):
            found: list[str] = []
            stop = yield from scan.until(Markers.of((self.between, "{")), found.append)
            scan.at -= len(stop.marker)
            return "".join(found)
        return ""
