"""Block maps equal the pool's state, whenever they were opened."""

import random

import pytest

from blocks import Allocate, Commit, Condemn, CondemnReason, Fork, Free, FreeReason, Pin, Reset, Step, Trim, WindowKind
from kvmanager import BlockState, Cell, KVManager, PoolSpec, entries_of
from kvmanager.observe import block_map, table_follower
from tests.kvmanager.test_report import random_step
from tests.kvmanager.tiny_pools import end_of, manager_with


@pytest.fixture(autouse=True)
def short_slices(monkeypatch):
    """Shorten the slices, so that Steps run between them even in a tiny pool."""
    for module in (block_map, table_follower):
        monkeypatch.setattr(module, "_SLICE", 3)
    monkeypatch.setattr(block_map, "_SLICE_SEARCHED", 1)


def expected(pool, *, host):
    """Compute the cells from the pool's tables."""
    tier = pool.host if host else pool.device
    cells = []
    for block in range(1, tier.total + 1):
        holders = [one.id for one in pool.sequences.values() if one.swapped == host and block in one.table]
        pins = 0 if host else sum(block in blocks for blocks in pool.state.pins.values())
        count = len(holders) + pins
        keyed = tier.key(block) is not None
        if count:
            state = BlockState.HELD
        elif block in tier.marks.withheld():
            state = BlockState.WITHHELD
        else:
            state = BlockState.CACHED if keyed else BlockState.FREE
        owner = holders[0] if count == 1 and holders else 0
        cells.append(Cell(state, keyed, pins > 0, count, owner, block in tier.keys.outlived))
    return cells


def cells(numbers):
    return [Cell.unpack(packed) for packed in numbers[1:]]


def test_an_empty_pools_blocks_are_free():
    manager, session = manager_with()
    drawn = manager.open_map(session).kinds[0]
    end_of(drawn.building())
    assert cells(drawn.device) == [Cell(BlockState.FREE, False, False, 0, 0)] * 12
    assert cells(drawn.host) == [Cell(BlockState.FREE, False, False, 0, 0)] * 6


def test_cells_have_states_keys_counts_owners_and_pins():
    manager, session = manager_with()
    for step in (
        Step(1, allocates=[Allocate(1, 1, "a", b"", [1, 0, 1, 0, 1], 5), Allocate(3, 3, "c", b"", [0, 0], 2)]),
        Step(2, commits=[Commit(1, 0, [1, 0, 1, 0]), Commit(3, 0, [0, 0])], pins=[Pin("pin", 1, 1)]),
        Step(3, forks=[Fork(1, 2, 3)], frees=[Free(3, FreeReason.FINISHED)]),
    ):
        assert manager.apply(session, step).result.refusals == ()
    drawn = manager.open_map(session).kinds[0]
    end_of(drawn.building())
    assert cells(drawn.device)[:5] == [
        Cell(BlockState.HELD, True, True, 3, 0),
        Cell(BlockState.HELD, True, False, 2, 0),
        Cell(BlockState.FREE, False, False, 0, 0),
        Cell(BlockState.CACHED, True, False, 0, 0),
        Cell(BlockState.FREE, False, False, 0, 0),
    ]
    manager.apply(session, Step(4, frees=[Free(1, FreeReason.FINISHED)]))
    changes = end_of(drawn.updating())
    assert list(changes.device[::2]) == [1, 2]
    assert cells(drawn.device)[1] == Cell(BlockState.HELD, True, False, 1, 2)
    assert end_of(drawn.updating()) == ((changes.device[:0]), (changes.host[:0]))


def test_more_than_255_holders_count_as_255():
    manager, session = manager_with()
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "a", b"", [1, 0], 2)]))
    manager.apply(session, Step(2, forks=[Fork(1, child, 2) for child in range(2, 300)]))
    drawn = manager.open_map(session).kinds[0]
    end_of(drawn.building())
    assert cells(drawn.device)[0] == Cell(BlockState.HELD, False, False, 255, 0)


class Updating:
    """A map built and updated one slice at a time."""

    def __init__(self, manager, session):
        self.map = manager.open_map(session).kinds[0]
        self._work = self.map.building()

    def go_on(self):
        try:
            next(self._work)
        except StopIteration:
            self._work = self.map.updating()

    def finish(self):
        for work in (self._work, self.map.updating()):
            end_of(work)


@pytest.mark.parametrize("seed", range(60))
def test_a_map_opened_at_any_time_and_updated_irregularly_is_right(seed):
    draw = random.Random(seed)
    manager, session = manager_with()
    pool, begin = session.pool, draw.randint(0, 200)
    updating = None
    for number in range(1, 200):
        manager.apply(session, random_step(pool, draw, number))
        if number == begin:
            for tier in (pool.device, pool.host):  # as after an adoption of blocks that outlived their engine
                tier.keys.outlived.update(block for block, key in enumerate(tier.keys.by_block) if key is not None)
            updating = Updating(manager, session)
        for _ in range(draw.randint(0, 3) if updating else 0):
            updating.go_on()
        if draw.random() < 0.02:
            blocks = [draw.randint(1, pool.device.total)]
            pool.withhold(blocks, [])
            if updating:
                updating.map.touch(blocks, host=False)
    updating = updating or Updating(manager, session)
    updating.finish()
    assert cells(updating.map.device) == expected(pool, host=False)
    assert cells(updating.map.host) == expected(pool, host=True)


@pytest.mark.parametrize("seed", range(50))
def test_a_map_opened_between_two_slices_of_a_step_is_right_at_its_end(seed):
    draw = random.Random(seed)
    manager, session = manager_with()
    for number in range(1, 20):
        manager.apply(session, random_step(session.pool, draw, number))
    work = manager.applying(session, random_step(session.pool, draw, 20), budget=1)
    for _ in range(draw.randint(0, 5)):
        next(work, None)
    updating = Updating(manager, session)
    for _ in work:
        updating.go_on()
    updating.finish()
    assert cells(updating.map.device) == expected(session.pool, host=False)
    assert cells(updating.map.host) == expected(session.pool, host=True)


def test_applying_an_update_to_the_old_map_gives_the_new_one():
    draw = random.Random(7)
    manager, session = manager_with()
    drawn = manager.open_map(session).kinds[0]
    end_of(drawn.building())
    copies = [list(drawn.device), list(drawn.host)]
    for number in range(1, 200):
        manager.apply(session, random_step(session.pool, draw, number))
        for copy, changes in zip(copies, end_of(drawn.updating()), strict=True):
            for block, packed in zip(changes[::2], changes[1::2], strict=True):
                assert copy[block] != packed, "an unchanged block is listed"
                copy[block] = packed
    assert copies == [list(drawn.device), list(drawn.host)]


def test_a_reset_updates_the_map():
    manager, session = manager_with()
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "a", b"", [1, 0], 2)]))
    manager.apply(session, Step(2, commits=[Commit(1, 0, [1, 0])], frees=[Free(1, FreeReason.FINISHED)]))
    drawn = manager.open_map(session).kinds[0]
    end_of(drawn.building())
    assert cells(drawn.device)[0].state is BlockState.CACHED
    manager.apply(session, Step(3, pins=[Reset()]))
    end_of(drawn.updating())
    assert cells(drawn.device)[0].state is BlockState.FREE


def test_a_map_shows_condemned_blocks_of_each_tier_and_kind():
    manager = KVManager(epoch=1)
    window = WindowKind("window", tokens=5, device_blocks=6, host_blocks=2)
    session = manager.attach(PoolSpec("engine", 1, "model", 4, 8, 4, windows=(window,)))
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "request", b"", [*range(12)], 12)]))
    drawn = manager.open_map(session)
    end_of(drawn.building())
    condemns = [
        Condemn(0, [1, 8], CondemnReason.HIT),
        Condemn(0, [4], CondemnReason.HIT, host=True),
        Condemn(0, [6], CondemnReason.HIT, kind=1),
        Condemn(0, [2], CondemnReason.HIT, host=True, kind=1),
    ]
    manager.apply(session, Step(2, condemns=condemns))
    changed = [[list(tier[::2]) for tier in kind] for kind in end_of(drawn.updating())]
    assert changed == [[[8], [4]], [[6], [2]]], "held blocks look as before"
    manager.apply(session, Step(3, frees=[Free(1, FreeReason.FINISHED)]))
    end_of(drawn.updating())
    for kind, state, device, host in zip(drawn.kinds, session.pool.state.kinds, ([1, 8], [6]), ([4], [2]), strict=True):
        for numbers, tier, blocks in ((kind.device, state.device, device), (kind.host, state.host, host)):
            shown = [block for block, cell in enumerate(cells(numbers), 1) if cell.state is BlockState.WITHHELD]
            assert shown == blocks == tier.marks.withheld()


def test_a_closed_map_receives_no_changes():
    manager, session = manager_with()
    whole = manager.open_map(session)
    [drawn] = whole.kinds
    end_of(whole.building())
    manager.close_map(session, whole)
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "a", b"", [1, 0], 2)]))
    assert list(end_of(drawn.updating()).device) == []


def test_the_entries_of_a_block_have_its_computed_tokens():
    manager, session = manager_with()
    state = session.pool.state
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "a", b"", [1, 0, 1], 3)], lengths=[(1, 3)]))
    manager.apply(session, Step(2, forks=[Fork(1, 2, 3)], allocates=[Allocate(3, 3, "b", b"", [0], 1)]))
    assert end_of(entries_of(state, 2, host=False)) == [(1, 1, 1), (2, 1, 1)]
    assert end_of(entries_of(state, 3, host=False)) == [(3, 0, 0)]
    assert end_of(entries_of(state, 2, host=True)) == []
    manager.apply(session, Step(3, swap_outs=[3]))
    assert end_of(entries_of(state, 1, host=True)) == [(3, 0, 0)]


def test_each_kind_of_blocks_has_its_own_map():
    manager = KVManager(epoch=1)
    window = WindowKind("window", tokens=5, device_blocks=6)
    session = manager.attach(PoolSpec("engine", 1, "model", 4, 8, windows=(window,)))
    prompt = [*range(12)]
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "request", b"", prompt, 12)]))
    drawn = manager.open_map(session)
    end_of(drawn.building())
    assert [[Cell.unpack(cell).state.name for cell in kind.device[1:]] for kind in drawn.kinds] == [
        ["HELD"] * 3 + ["FREE"] * 5,
        ["HELD"] * 3 + ["FREE"] * 3,
    ]
    manager.apply(session, Step(2, commits=[Commit(1, 0, prompt)], trims=[Trim(1, 12)]))
    changes = end_of(drawn.updating())
    assert [list(kind.device[::2]) for kind in changes] == [[1, 2, 3], [1, 2, 3]]
    # A prompt that continues behind the last whole block of this one but one needs the second block.
    assert [Cell.unpack(cell).state.name for cell in drawn.kinds[1].device[1:4]] == ["FREE", "CACHED", "HELD"]
    assert len(drawn) == 9 + 1 + 7 + 1
