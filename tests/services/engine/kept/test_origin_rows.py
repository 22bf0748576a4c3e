"""Rows beside kept blocks: each keyed block has its own after any Step, and a broken one proves nothing."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from blocks import Allocate, Commit, Step, block_keys, root_key
from engine.kept.header import KeptIdentity, KeptKind
from engine.kept.seal_writer import SealChanges, TierChanges
from engine.kept.seals import Sealing
from kvmanager import AppliedStep, Pool, PoolReport, PoolSpec, PoolState, TierReport
from services.engine.events.announcements import Announcements
from services.engine.events.origins import Origin, salt_digest
from services.engine.kept.origin_rows import SALT_BYTES, OriginRows, row_bytes
from services.engine.kept.step_changes import BeforeStep, seal_changes
from tests.kvmanager.random_runs import random_runs
from tests.kvmanager.test_random_kinds import RandomKinds
from tests.kvmanager.test_random_steps import SIZE

MODEL = "model"


def identity_of(block_size: int, *kinds: tuple[int, int]) -> KeptIdentity:
    made = tuple(KeptKind(f"kind {number}", "", 0, *blocks) for number, blocks in enumerate(kinds))
    return KeptIdentity(boot_id="b", dtype="float32", block_size=block_size, kinds=made, backend="cpu", fingerprint="f")


def origin_of(salt: bytes, resets: int, tokens: list[int], block_size: int) -> tuple[bytes, Origin]:
    """Return the key of the last block of a chain's tokens, and what it is the hash of."""
    root = root_key(MODEL, salt, resets)
    *_, hashed, key = (root, root, *block_keys(root, tokens, block_size))
    last = array("i", tokens[-block_size:]).tobytes()
    return key, Origin(hashed, len(tokens) == block_size, last, salt_digest(salt, b"key"))


def report_of(kinds: Iterable[Sequence[dict[int, bytes]]]) -> PoolReport:
    report, *windows = (PoolReport(device=TierReport(keyed=one), host=TierReport(keyed=of)) for one, of in kinds)
    report.windows = windows
    return report


def following(
    announcements: Announcements, apply: Callable[[Step], AppliedStep], step: Step, all_rows: Iterable[OriginRows]
) -> AppliedStep:
    """Apply a Step, and write the rows that it changes, as an engine's replica does."""
    state = announcements._state
    sound = replace(step, commits=[one for one in step.commits if not is_swapped(state, one.sequence)])
    before = [BeforeStep.of(kind, sound, number) for number, kind in enumerate(state.kinds)]
    announcements.before(step)
    applied = apply(step)
    announcements.applied(step, applied.result.refusals)
    own = zip(state.kinds, before, (applied, *applied.windows), strict=True)
    changes, *windows = [seal_changes(*one) for one in own]
    for rows in all_rows:
        rows.record(changes._replace(windows=windows), state.kinds, announcements.fields)
    announcements.changes()
    return applied


def is_swapped(state: PoolState, sequence: int) -> bool:
    """Whether a commit is refused that no engine sends."""
    return sequence in state.sequences and state.sequences[sequence].swapped


class RandomRows(RandomKinds):
    """The rows of a pool with random Steps have the contents of its twin."""

    pool: Any
    twin: Any
    rows: list[OriginRows] | None = None

    def begin_rows(self) -> None:
        kinds = self.pool.state.kinds
        self.identity = identity_of(SIZE, *((kind.device.total, kind.host.total) for kind in kinds))
        self.memory = bytearray(row_bytes(self.identity))
        self.unsalted = bytearray(row_bytes(self.identity))
        self.rows = [self.rows_of(self.memory), self.rows_of(self.unsalted, salts=False)]
        self.announcements = Announcements(self.pool.state, {}, salts=b"key")
        self.wrap(self.pool.apply)

    def rows_of(self, memory: bytearray, kinds: Any = None, *, salts: bool = True) -> OriginRows:
        report = report_of(kinds or [({}, {})] * len(self.identity.kinds))
        return OriginRows(memoryview(memory), self.identity, report, salts=salts)

    def wrap(self, apply: Callable[[Step], AppliedStep]) -> None:
        """Write the rows of each Step that is applied to the pool."""
        self.pool.apply = lambda step: following(self.announcements, apply, step, self.rows or ())

    def apply(self, **items: Any) -> None:
        if self.rows is None:
            self.begin_rows()
        out = items.get("swap_outs", ())
        items |= {"swap_ins": [group for group in items.get("swap_ins", ()) if group not in out]}  # no engine does both
        super().apply(**items)  # type: ignore[no-untyped-call]
        for number, kind in enumerate(self.twin.kinds):
            for host, tier in enumerate((kind.device, kind.host)):
                for block, (resets, salt, *tokens) in tier.contents.items():
                    key, origin = origin_of(salt, resets, tokens, SIZE)
                    assert self.found(self.memory, number, host, block, key, salts=True) == {key: origin}
                    public = {} if salt else {key: origin}
                    assert self.found(self.unsalted, number, host, block, key, salts=False) == public

    def found(self, memory: bytearray, kind: int, host: int, block: int, key: bytes, *, salts: bool) -> Any:
        """Return what a process finds that knows one block."""
        keyed: list[list[dict[int, bytes]]] = [[{}, {}] for _ in self.identity.kinds]
        keyed[kind][host][block] = key
        return self.rows_of(memory, keyed, salts=salts).take_adopted()


RandomRows.TestCase.settings = random_runs(examples=150, steps=9)
TestRandomRows = RandomRows.TestCase


def test_a_block_that_is_committed_and_takes_a_swapped_one_in_the_same_step_has_the_row_of_what_it_took() -> None:
    pool = Pool(PoolSpec("engine", 1, MODEL, SIZE, device_blocks=1, host_blocks=2))
    identity = identity_of(SIZE, (1, 2))
    memory = bytearray(row_bytes(identity))
    rows = OriginRows(memoryview(memory), identity, PoolReport(), salts=True)
    announcements = Announcements(pool.state, {}, salts=b"key")
    first, second = [1, 2], [3, 4]
    for step in (
        Step(1, allocates=[Allocate(1, 1, "r1", b"", first, 2)]),
        Step(2, commits=[Commit(1, 0, first)], swap_outs=[1], allocates=[Allocate(2, 2, "r2", b"", second, 2)]),
        Step(3, commits=[Commit(2, 0, second)], swap_outs=[2], swap_ins=[1]),
    ):
        following(announcements, pool.apply, step, [rows])
    device, host = (
        {block: tier.key(block) or b"" for block in range(1, tier.total + 1)} for tier in (pool.device, pool.host)
    )
    taken, key_of_second = origin_of(b"", 0, first, SIZE), origin_of(b"", 0, second, SIZE)[0]
    assert device == {1: taken[0]}
    of_device = OriginRows(memoryview(memory), identity, report_of([(device, {})]), salts=True)
    assert of_device.take_adopted() == dict([taken])
    of_host = OriginRows(memoryview(memory), identity, report_of([({}, host)]), salts=True)
    assert (set(of_host.take_adopted()), of_host.unknown) == ({taken[0], key_of_second}, 0)


# Rows that a kill, a fault or another process has broken.

BLOCK_SIZE, BLOCKS = 4, 6
IDENTITY = identity_of(BLOCK_SIZE, (BLOCKS, 0))
CHAINS = {"plain": (b"", [*range(8)]), "salted": (b"salt", [*range(12)]), "again": (b"", [*range(8, 12)])}


def chain(salt: bytes, tokens: list[int]) -> dict[bytes, Origin]:
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return dict(origin_of(salt, 0, tokens[:end], BLOCK_SIZE) for end in ends)


ORIGINS = {key: origin for one in CHAINS.values() for key, origin in chain(*one).items()}
KEYED = dict(enumerate(ORIGINS, 1))
STATES: list[PoolState] = [None]  # type: ignore[list-item]  # is read for copies alone


def written(keyed: Mapping[int, bytes] = KEYED, memory: bytearray | None = None) -> bytearray:
    memory = memory or bytearray(row_bytes(IDENTITY))
    rows = OriginRows(memoryview(memory), IDENTITY, report_of([({}, {})]), salts=True)
    sealed = {block: Sealing(key, 0, 0) for block, key in keyed.items()}
    rows.record(SealChanges(TierChanges(sealed=sealed)), STATES, ORIGINS.get)
    return memory


def read(memory: bytearray, *, salts: bool = True) -> OriginRows:
    return OriginRows(memoryview(memory), IDENTITY, report_of([(dict(KEYED), {})]), salts=salts)


def test_an_origin_is_read_as_it_was_written() -> None:
    found = read(written())
    adopted = found.take_adopted()
    assert (adopted, found.unknown) == (ORIGINS, 0)
    assert [first for _, first, _, _ in adopted.values()] == [True, False, True, False, False, True]
    assert found.take_adopted() == {}, "nothing is held twice"
    assert len(salt_digest(b"salt", b"key")) == 2 * SALT_BYTES


@given(seed=st.integers(0, 1 << 32), flips=st.integers(1, 40))
def test_flipped_bits_lose_rows_and_make_none_wrong(seed: int, flips: int) -> None:
    memory, random = written(), Random(seed)
    used = (BLOCKS + 1) * (64 + 4 * BLOCK_SIZE)
    assert any(memory[:used][-64:])
    assert not any(memory[used:])
    for _ in range(flips):
        memory[random.randrange(used)] ^= 1 << random.randrange(8)
    found = read(memory)
    adopted = found.take_adopted()
    assert adopted.items() <= ORIGINS.items()
    assert found.unknown == len(ORIGINS) - len(adopted)


@given(order=st.permutations(list(ORIGINS)), torn=st.integers(0, 64 + 4 * BLOCK_SIZE))
def test_a_row_of_two_writers_is_that_of_its_key_or_none(order: list[bytes], torn: int) -> None:
    old, new = written(dict(enumerate(order, 1))), written()
    size = 64 + 4 * BLOCK_SIZE
    for block in KEYED:
        start = block * size
        old[start : start + torn] = new[start : start + torn]
    adopted = read(old).take_adopted()
    assert adopted.items() <= ORIGINS.items()
    assert {key for block, key in KEYED.items() if order[block - 1] == key} <= adopted.keys()


def test_a_memory_without_rows_has_no_origins() -> None:
    found = read(bytearray(row_bytes(IDENTITY)))
    assert (found.take_adopted(), found.unknown) == ({}, len(KEYED))


def test_rows_of_salted_chains_are_erased_where_salts_are_omitted() -> None:
    memory = written()
    plain = {key: origin for key, origin in ORIGINS.items() if not origin.salt}
    found = read(memory, salts=False)
    assert found.take_adopted() == plain
    assert read(memory).take_adopted() == plain, "nothing is left of the others"


def test_rows_that_are_closed_write_nothing() -> None:
    memory = bytearray(row_bytes(IDENTITY))
    rows = read(memory)
    rows.close()
    rows.record(SealChanges(TierChanges(sealed={1: Sealing(KEYED[1], 0, 0)})), STATES, ORIGINS.get)
    assert not any(memory)
