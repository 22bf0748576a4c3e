"""The host tier in the engine's view of its pool."""

from itertools import count

from blocks import TableChange
from engine.schedule.capacity import Capacity
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.sequence_group import Group


def test_a_reused_host_block_is_no_copy_of_its_previous_block():
    view = PoolView(Capacity(64, 50, 4, 10, 10))
    first, sharer, other = (
        Group.of(Request(f"r{n}", (1,) * 4, Sampling(), Stopping(2)), count(n)).trunk for n in (1, 2, 3)
    )
    for sequence, block in ((first, 5), (sharer, 5), (other, 6)):
        view.grant(sequence, TableChange(sequence.id, 0, [block], 4, 0))
    view.begin_swap_out([first])
    view.grant(first, TableChange(1, 0, [1], 4, 0), to_host=True)
    assert view.host_cost([5, 6]) == 1, "host block 1 is a copy of block 5"
    view.grant(first, TableChange(1, 0, [5], 4, 0))
    view.begin_swap_out([other])
    view.grant(other, TableChange(3, 0, [1], 4, 0), to_host=True)
    assert view.host_cost([5]) == 1, "host block 1 is a copy of block 6"
