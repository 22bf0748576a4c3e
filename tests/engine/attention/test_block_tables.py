"""The inputs of a step: block tables that stay on a device, and all integers in one copy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.block_tables import BlockTables
from engine.attention.upload import Integers, pack, unpack
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work

Tables = dict[int, tuple[int, ...]]


def tables_elsewhere() -> BlockTables:
    """Return tables with a copy on a device; its tensors stay on the CPU."""
    tables = BlockTables(torch.device("cpu"))
    tables._on_host = False
    return tables


def step(tables: BlockTables, wanted: Tables) -> tuple[np.ndarray, int]:
    """Return the tables of a step, and the number of blocks that were written for it."""
    work = [Work(number, (0,), 0, table, True, Sampling()) for number, table in wanted.items()]
    found = tables.update(work)
    changed = len(found.uploads[1]) if found.uploads else 0
    return tables.select(found, [torch.from_numpy(one) for one in found.uploads]).numpy(), changed


def selected(tables: BlockTables, work: list[Work]) -> torch.Tensor:
    """Return the tables of a step."""
    found = tables.update(work)
    return tables.select(found, [torch.from_numpy(one) for one in found.uploads])


def padded(wanted: Tables) -> np.ndarray:
    width = max(map(len, wanted.values()), default=0)
    rows = [(*table, *[0] * (width - len(table))) for table in wanted.values()]
    return np.array(rows, dtype=np.int32).reshape(len(rows), width)


_numbers = st.integers(1, 40)
_tables = st.lists(st.integers(1, 1000), max_size=20).map(tuple)


@given(steps=st.lists(st.dictionaries(_numbers, _tables, max_size=30), min_size=1, max_size=6))
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_tables_of_each_step_are_those_of_its_work(elsewhere: bool, steps: list[Tables]) -> None:
    tables = tables_elsewhere() if elsewhere else BlockTables(torch.device("cpu"))
    for wanted in steps:
        assert np.array_equal(step(tables, wanted)[0], padded(wanted))


def test_a_step_uploads_only_the_blocks_that_changed() -> None:
    tables = tables_elsewhere()
    wanted = {number: tuple(range(number, number + 10)) for number in range(1, 9)}
    step(tables, wanted)
    assert step(tables, wanted)[1] == 0
    wanted[3] = (*wanted[3], 77)
    assert step(tables, wanted)[1] == 1
    wanted[3] = (99, *wanted[3][1:])
    assert step(tables, wanted)[1] == 11
    del wanted[5]
    assert step(tables, wanted)[1] == 0


def test_steps_with_the_same_tables_share_one_tensor() -> None:
    for tables in (tables_elsewhere(), BlockTables(torch.device("cpu"))):
        table = (5, 6)
        work = [Work(1, (0,), 0, table, True, Sampling()), Work(2, (0,), 0, (7,), True, Sampling())]
        kept = [selected(tables, work) for _ in range(2)]
        assert kept[0] is kept[1]
        assert selected(tables, [work[1], work[0]]).tolist() == [[7, 0], [5, 6]]
        assert kept[0].tolist() == [[5, 6], [7, 0]]


def test_what_a_failed_step_did_not_write_is_written_with_the_next() -> None:
    tables = tables_elsewhere()
    step(tables, {1: (5, 6)})
    tables.update([Work(1, (0,), 0, (5, 6, 7), True, Sampling())])  # no upload follows
    assert np.array_equal(step(tables, {1: (5, 6, 7, 8)})[0], padded({1: (5, 6, 7, 8)}))


def test_packed_arrays_are_unpacked_with_their_types_at_aligned_addresses() -> None:
    arrays: list[Integers] = []
    for size in (3, 0, 5, 1):
        arrays += [np.arange(size, dtype=np.int32), np.arange(size, dtype=np.int64)]
    parts = unpack(pack(arrays, pinned=False), arrays)
    assert [(one.numpy().dtype, one.tolist()) for one in parts] == [(one.dtype, one.tolist()) for one in arrays]
    first = parts[0].data_ptr()
    assert all((one.data_ptr() - first) % 16 == 0 for one in parts if len(one))
