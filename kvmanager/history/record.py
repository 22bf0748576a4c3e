"""Records of operations: a pool as it was, every Step applied to it, and a checksum of what came of it.

A record is text, one JSON object a line: a header, a snapshot of the pool in pages, a line for each Step, and a last
line that says why it ends. Each line carries the checksum of all up to it: sha256 over the previous one, what was
asked, and what was answered (ids, keys, copies, refusals, counts). Same Steps, same ids: a replay on the same core
comes to the same checksums, so where it does not, either the core answers otherwise or the line was changed.

A record contains token ids. Files and clocks belong to whoever writes the lines and reads them.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from blocks import Allocate, Commit, Extend, Fork, Free, FreeReason, Pin, PinChange, Reset, Step, Unpin
from kvmanager.adoption import adopt
from kvmanager.applied import Applied
from kvmanager.errors import InvalidRegistration, InvalidReport, StepOutOfOrder
from kvmanager.parts import parts_of
from kvmanager.pool import Pool
from kvmanager.pool_spec import PoolSpec
from kvmanager.report import PoolReport, SequenceReport, TierReport

OPERATIONS_FORMAT = "quire-operations"
OPERATIONS_VERSION = 1
_CONTAINS = "a pool of KV blocks in report form, and every Step of block operations applied to it since"
_SENSITIVE = "contains token ids"

# Entries of a snapshot in one line: well below a millisecond of work.
_PAGE = 500

# A line's content, as JSON has it.
_Content = dict[str, Any]


class InvalidRecord(Exception):
    """A line is none of a record of operations; the message says which and why."""


class RecordParted(Exception):
    """A replay came to another checksum than the record: at Step `step`, or at the snapshot where that is None."""

    def __init__(self, message: str, step: int | None) -> None:
        super().__init__(message)
        self.step = step


class OperationsRecord:
    """Writes the lines of one session's record: `begin`, then `applied` for each Step in order, then `end`."""

    def __init__(self, spec: PoolSpec) -> None:
        """Begin the record of a pool."""
        self._spec = spec
        self._checksum = b""
        self._steps = 0

    def begin(self, report: PoolReport, created: str) -> Iterator[str]:
        """Yield the header and the snapshot. `created` says for people when the session began."""
        header = {
            "format": OPERATIONS_FORMAT,
            "version": OPERATIONS_VERSION,
            "contains": _CONTAINS,
            "sensitive": _SENSITIVE,
            "created": created,
            "engine_id": self._spec.engine_id,
            "spec": asdict(self._spec),
        }
        yield _line(header)
        self._checksum = _first_checksum(header["spec"])
        for page in _pages(report):
            self._checksum = _page_checksum(self._checksum, page)
            yield _line({"snapshot": page, "checksum": self._checksum.hex()})

    def applied(self, step: Step, applied: Applied) -> list[str]:
        """Return the line of a Step that was applied with this result."""
        content = _step_content(step)
        if applied.result.withheld_blocks or applied.result.host_withheld_blocks:
            content["withheld"] = (applied.result.withheld_blocks, applied.result.host_withheld_blocks)
        self._checksum = _next_checksum(self._checksum, content, applied)
        self._steps += 1
        return [_line({**content, "checksum": self._checksum.hex()})]

    def end(self, reason: str) -> list[str]:
        """Return the last line, which says in words why nothing follows."""
        return [_line({"end": reason, "steps": self._steps})]


@dataclass
class OperationsReplay:
    """Applies a record line by line to the core that wrote it: `take` each line in order.

    `steps` counts those applied, `end` is the reason that the last line gives: None while there was none.
    """

    header: _Content
    steps: int = 0
    end: str | None = None
    _report: PoolReport = field(default_factory=PoolReport)
    _pool: Pool | None = None
    _checksum: bytes = b""
    _lines: int = 1

    @classmethod
    def of(cls, header_line: str) -> "OperationsReplay":
        """Begin with the first line. Raises InvalidRecord when it is no header of this format and version."""
        header = _content(header_line, 1)
        if header.get("format") != OPERATIONS_FORMAT or header.get("version") != OPERATIONS_VERSION:
            raise InvalidRecord(
                f"line 1 says format {header.get('format')!r}, version {header.get('version')!r}; "
                f"read here is {OPERATIONS_FORMAT!r}, version {OPERATIONS_VERSION}"
            )
        return cls(header)

    @property
    def pool(self) -> Pool:
        """The pool as it is after the lines taken. Raises InvalidRecord before the snapshot."""
        if self._pool is None:
            raise InvalidRecord("it ends before the snapshot of the pool is complete")
        return self._pool

    @property
    def checksum(self) -> str:
        """The checksum that the replay has come to, as hexadecimal digits."""
        return self._checksum.hex()

    def take(self, line: str) -> None:
        """Take the next line. Raises RecordParted where the replay comes to another checksum, and InvalidRecord."""
        self._lines = number = self._lines + 1
        content = _content(line, number)
        if self.end is not None:
            raise InvalidRecord(f"line {number} follows the last line")
        try:
            self._take(content)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise InvalidRecord(f"line {number} cannot be read: {type(error).__name__}: {error}") from error
        except (InvalidReport, InvalidRegistration) as error:
            raise InvalidRecord(f"line {number}: {error}") from error

    def _take(self, content: _Content) -> None:
        if "end" in content:
            self.end = str(content["end"])
        elif self._pool is None:
            self._take_snapshot(content)
        else:
            self._take_step(content)

    def _take_snapshot(self, content: _Content) -> None:
        page = content["snapshot"]
        self._checksum = _page_checksum(self._checksum or _first_checksum(self.header["spec"]), page)
        if self.checksum != content["checksum"]:
            raise RecordParted("the snapshot or the header's spec is not as it was recorded", None)
        _add_page(self._report, page)
        if page.get("last"):
            self._pool = _adopted(PoolSpec(**self.header["spec"]), self._report)

    def _take_step(self, content: _Content) -> None:
        step = _step(content)
        self.pool.withhold(*content.get("withheld", ((), ())))
        try:
            applied = self.pool.apply(step)
        except StepOutOfOrder as error:
            raise RecordParted(f"step {step.step} cannot follow: {error}", step.step) from error
        recorded = content.pop("checksum")
        self._checksum = _next_checksum(self._checksum, content, applied)
        if self.checksum != recorded:
            raise RecordParted(
                f"step {step.step} parts from the record: the core answers it otherwise, or its line was changed",
                step.step,
            )
        self.steps += 1


def _adopted(spec: PoolSpec, report: PoolReport) -> Pool:
    adoption = adopt(spec, report)
    while True:
        try:
            next(adoption)
        except StopIteration as end:
            pool: Pool = end.value
            return pool


# Checksums.


def _first_checksum(spec: Any) -> bytes:
    return sha256(_line([OPERATIONS_FORMAT, OPERATIONS_VERSION, spec]).encode()).digest()


def _page_checksum(previous: bytes, page: _Content) -> bytes:
    return sha256(previous + _line(page).encode()).digest()


def _next_checksum(previous: bytes, step: _Content, applied: Applied) -> bytes:
    digest = sha256(previous)
    for part in (
        _line([step, _answer(applied)]).encode(),
        *applied.sealed_keys,
        *(key for _, key in applied.host_sealed),
    ):
        digest.update(part)
    return digest.digest()


def _answer(applied: Applied) -> list[Any]:
    return [
        [(refusal.item.value, refusal.position, refusal.reason.value) for refusal in applied.result.refusals],
        applied.result.tables,
        applied.sealed_blocks,
        [seal.block for seal in applied.host_sealed],
        applied.result.device_to_host,
        applied.result.host_to_device,
        applied.result.copies,
        applied.device,
        applied.host,
    ]


# Lines.


def _line(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), sort_keys=True)


def _content(line: str, number: int) -> _Content:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"line {number} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRecord(f"line {number} is no JSON object")
    return content


# Snapshots, in pages: a line is made at one go, and a large pool must not keep its maker from everything else.


def _pages(report: PoolReport) -> Iterator[_Content]:
    yield {"resets": report.resets, "last_step": report.last_step}
    for sequences in parts_of(report.sequences, _PAGE):
        yield {"sequences": [{**vars(sequence), "salt": sequence.salt.hex()} for sequence in sequences]}
    for pins in parts_of(report.pins.items(), _PAGE):
        yield {"pins": pins}
    for name, tier in (("device", report.device), ("host", report.host)):
        for page in _tier_pages(tier):
            yield {name: page}
    yield {"last": True}


def _tier_pages(tier: TierReport) -> Iterator[_Content]:
    for name, keys in (("keyed", tier.keyed), ("unfindable", tier.unindexed)):
        for seals in parts_of(keys.items(), _PAGE):
            yield {name: [(block, key.hex()) for block, key in seals]}
    for name, blocks in (("release_order", tier.release_order), ("withheld", tier.withheld)):
        for part in parts_of(blocks, _PAGE):
            yield {name: part}


def _add_page(report: PoolReport, page: _Content) -> None:
    report.resets = page.get("resets", report.resets)
    report.last_step = page.get("last_step", report.last_step)
    for one in page.get("sequences", ()):
        report.sequences.append(SequenceReport(**{**one, "salt": bytes.fromhex(one["salt"])}))
    report.pins.update(page.get("pins", ()))
    _add_tier_page(report.device, page.get("device", {}))
    _add_tier_page(report.host, page.get("host", {}))


def _add_tier_page(tier: TierReport, page: _Content) -> None:
    tier.keyed.update((block, bytes.fromhex(key)) for block, key in page.get("keyed", ()))
    tier.unindexed.update((block, bytes.fromhex(key)) for block, key in page.get("unfindable", ()))
    tier.release_order += page.get("release_order", ())
    tier.withheld += page.get("withheld", ())


# Steps. Items are lists of their fields; lists without items are left out.


def _step_content(step: Step) -> _Content:
    lists = {
        "commits": [(item.sequence, item.first_index, list(item.token_ids)) for item in step.commits],
        "pins": [_pin_content(item) for item in step.pins],
        "forks": list(step.forks),
        "frees": [(item.sequence, item.reason.value, item.preempted_for_group) for item in step.frees],
        "swap_outs": list(step.swap_outs),
        "swap_ins": list(step.swap_ins),
        "extends": [(item.group, list(item.rooms)) for item in step.extends],
        "allocates": [(*item[:3], item.salt.hex(), list(item.token_ids), *item[5:]) for item in step.allocates],
        "lengths": list(step.lengths),
    }
    return {"step": step.step, **{name: items for name, items in lists.items() if items}}


def _pin_content(item: PinChange) -> Sequence[Any]:
    return (type(item).__name__.lower(), *item)


def _step(content: _Content) -> Step:
    def items(name: str, make: Callable[..., Any]) -> list[Any]:
        return [make(*item) for item in content.get(name, ())]

    return Step(
        step=content["step"],
        commits=items("commits", lambda sequence, first, tokens: Commit(sequence, first, array("i", tokens))),
        pins=items("pins", _pin_change),
        forks=items("forks", Fork),
        frees=items("frees", lambda sequence, reason, group: Free(sequence, FreeReason(reason), group)),
        swap_outs=content.get("swap_outs", ()),
        swap_ins=content.get("swap_ins", ()),
        extends=items("extends", lambda group, rooms: Extend(group, [(sequence, room) for sequence, room in rooms])),
        allocates=items("allocates", _allocate),
        lengths=items("lengths", lambda sequence, tokens: (sequence, tokens)),
    )


def _pin_change(kind: str, *fields: Any) -> PinChange:
    kinds: dict[str, Callable[..., PinChange]] = {"pin": Pin, "unpin": Unpin, "reset": Reset}
    return kinds[kind](*fields)


def _allocate(group: int, sequence: int, request_id: str, salt: str, tokens: list[int], *rest: Any) -> Allocate:
    return Allocate(group, sequence, request_id, bytes.fromhex(salt), array("i", tokens), *rest)
