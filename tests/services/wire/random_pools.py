"""Random pools that Steps reach, and their reports over the wire: each must be adopted as it was."""

import random
from dataclasses import replace
from typing import Any

from blocks import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Pin,
    Reset,
    Step,
    Unpin,
)
from kvmanager import Pool, PoolSpec, SequenceTable, adopt, report_of
from quire.v1 import kvmanager_pb2 as pb
from services.wire.attach import only_field
from services.wire.report import ReportReader, pages_of
from tests.services.wire.slicing import drain

KINDS = [
    *("allocates", "allocates", "commits", "commits", "extends", "extends", "forks", "forks", "forks", "forks"),
    *("frees", "frees", "swap_outs", "swap_outs", "swap_ins", "swap_ins", "pins", "pins", "lengths", "condemns"),
]
SIZES = [1, 2, 4]


class RandomPool:
    """A small pool after random Steps; some are half answered, as when an engine loses its manager."""

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        blocks = draw.choice([1, 2, 3, 5, 8, 20])
        self.pool = Pool(PoolSpec("engine", 1, "model", draw.choice(SIZES), blocks, draw.choice([0, 2, 6])))
        self._last_id = 0
        self._children = draw.choice([1, 1, 30])  # of one sequence at once
        for _ in range(draw.randint(1, 25)):
            self._step()
        if draw.random() < 0.3:
            self._withhold()

    def _step(self) -> None:
        items: dict[str, list[Any]] = {}
        for kind in self._draw.choices(KINDS, k=self._draw.randint(1, 5)):
            items.setdefault(kind, []).extend(getattr(self, f"_{kind}")())
        step = Step(self.pool.last_step + 1, **{kind: tuple(found) for kind, found in items.items()})
        if self._draw.random() < 0.1:  # its answer is lost: see services.engine.replica
            step = replace(step, swap_outs=(), swap_ins=(), extends=(), allocates=())
        self.pool.apply(step)
        assert self.pool.violations() == []

    def _withhold(self) -> None:
        """Withhold a block, as an audit does."""
        self.pool.withhold([self._draw.randint(1, self.pool.device.total)], [])

    def _sequence(self, *, swapped: bool = False) -> SequenceTable | None:
        found = [one for one in self.pool.sequences.values() if one.swapped == swapped]
        return self._draw.choice(found) if found else None

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _tokens(self, count: int) -> list[int]:
        return self._draw.choices([0, 1], k=count)

    def _allocates(self) -> list[Allocate]:
        number, tokens = self._new_id(), self._tokens(self._draw.randint(1, 10))
        salt = self._draw.choice([b"", b"", b"salt"])
        return [Allocate(number, number, f"request-{number}", salt, tokens, self._draw.randint(1, 10))]

    def _commits(self) -> list[Commit]:
        if (one := self._sequence()) is None:
            return []
        size = self.pool.spec.block_size
        blocks = one.room_tokens // size - one.committed_blocks
        if blocks < 1:
            return []
        return [Commit(one.id, one.committed_blocks, self._tokens(self._draw.randint(1, blocks) * size))]

    def _extends(self) -> list[Extend]:
        if (one := self._sequence()) is None:
            return []
        members = [self.pool.sequences[number] for number in self.pool.groups[one.group]]
        return [Extend(one.group, [(member.id, member.room_tokens + self._draw.randint(0, 4)) for member in members])]

    def _forks(self) -> list[Fork]:
        if (one := self._sequence()) is None:
            return []
        length = self._draw.randint(1, one.room_tokens)
        return [Fork(one.id, self._new_id(), length) for _ in range(self._children)]

    def _frees(self) -> list[Free]:
        one = self._sequence(swapped=self._draw.random() < 0.3)
        return [] if one is None else [Free(one.id, FreeReason.FINISHED)]

    def _swap_outs(self) -> list[int]:
        one = self._sequence()
        return [] if one is None else [one.group]

    def _swap_ins(self) -> list[int]:
        one = self._sequence(swapped=True)
        return [] if one is None else [one.group]

    def _pins(self) -> list[Pin | Unpin | Reset]:
        chance, one = self._draw.random(), self._sequence()
        if chance < 0.1:
            return [Reset()]
        if chance < 0.4:
            return [Unpin(self._draw.choice("abc"))]
        if one is None or not one.committed_blocks:
            return []
        return [Pin(self._draw.choice("abc"), one.id, self._draw.randint(1, one.committed_blocks))]

    def _condemns(self) -> list[Condemn]:
        one, host = self._sequence(), self.pool.host.total > 0 and self._draw.random() < 0.3
        blocks = [self._draw.randint(1, (self.pool.host if host else self.pool.device).total)]
        return [Condemn(one.id if one else 0, blocks, self._draw.choice(list(CondemnReason)), host)]

    def _lengths(self) -> list[Length]:
        one = self._sequence()
        return [] if one is None else [Length(one.id, self._draw.randint(0, one.room_tokens))]


def check_reported_and_adopted(pool: Pool) -> None:
    """Write a pool's report in pages, read them within the bounds, and check that the adopted pool is the same."""
    report, reader = report_of(pool), ReportReader(pool.spec)
    for page in pages_of(report):
        data = pb.PoolRequest(report=page).SerializeToString()
        drain(reader.add(only_field(data, "report")))
    again = drain(adopt(pool.spec, reader.report))
    assert again.violations() == []
    assert report_of(again) == report
