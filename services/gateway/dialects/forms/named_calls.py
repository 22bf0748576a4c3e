"""Calls as a name and a JSON object, with marks around them."""

from dataclasses import dataclass

from services.gateway.dialects.forms.call_form import Around, CallTarget, WrittenCall
from services.gateway.dialects.forms.json_text import stream_object
from services.gateway.dialects.scanner import Markers, Reading


@dataclass(frozen=True)
class NamedCalls:
    """`before` NAME `between` {...} `after`.

    `prefix` may stand in front of the name. `numbers`: the prefix, the name, a colon and a number are the call's id.
    `id_mark` and an id may follow the name. A `between` that is `optional` may be left out.
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
        if (yield from scan.skip()) != "{":
            return False
        target.start(name, call_id)
        yield from stream_object(target, self.after.strip() or target.closing)
        yield from scan.skip()
        yield from scan.expect(self.after.strip())
        target.end()
        return True

    def around(self, name: str) -> Around:
        """See JsonArguments."""
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
