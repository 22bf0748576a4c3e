"""Finds the longest prefix that every kind of blocks has cached.

Behind `boundary` blocks, a window kind needs only the blocks that the next token sees. All kinds must hit behind the
same number of blocks: each layer's keys and values are those of the same tokens (vLLM's groups of layers once disagreed
about it, vllm issue 46453).
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple

from kvmanager import parts
from kvmanager.parts import parts_of
from kvmanager.pool_state import PoolState
from kvmanager.verbs.admission import Hit, Missed


class Boundary(NamedTuple):
    """The `blocks` of a prefix that all kinds have, and each window kind's hits, which are the last of them.

    `found` are the blocks that kind 0 has. If they are more, `missed` is the last block before `found` that a window
    kind lacks: of the first kind that lacks any.
    """

    blocks: int
    found: int
    missed: Missed | None
    hits: list[list[Hit]]


def finding_boundary(state: PoolState, hits: Sequence[Hit]) -> Generator[int, None, Boundary]:
    """Find the longest prefix of `hits`, those of kind 0, behind which every window kind has what it needs.

    Each kind searches from the right: a block that it lacks ends all prefixes that need it. The search is repeated
    until no kind shortens the prefix of the others.
    """
    found = blocks = len(hits)
    missed: Missed | None = None
    before = -1
    while blocks and blocks != before:
        before = blocks
        for number, window in enumerate(state.windows, 1):
            blocks, lacked = yield from _searching(window, hits, blocks)
            if lacked and not missed:
                missed = Missed(lacked, number, found * state.block_size)
    own_hits = []
    for window in state.windows:
        own_hits.append((yield from _hits(window, hits, blocks)))
    return Boundary(blocks, found, missed, own_hits)


def _first_block(window: PoolState, blocks: int) -> int:
    """Return the first block that the token behind `blocks` blocks sees."""
    assert window.kind is not None
    return window.kind.first_block(blocks * window.block_size, window.block_size)


def _searching(window: PoolState, hits: Sequence[Hit], blocks: int) -> Generator[int, None, tuple[int, bytes | None]]:
    """Return the longest prefix that a kind has, and the key of the last block that it lacks of `blocks`."""
    index, first, done = blocks - 1, _first_block(window, blocks), 0
    lacked: bytes | None = None
    while index >= first:
        if _find(window, hits[index].key) is None:
            lacked = lacked or hits[index].key
            blocks, first = index, _first_block(window, index)
        index -= 1
        done += 1
        if done == parts.PART:
            yield done
            done = 0
    yield done
    return blocks, lacked


def _hits(window: PoolState, hits: Sequence[Hit], blocks: int) -> Generator[int, None, list[Hit]]:
    own: list[Hit] = []
    for part in parts_of(hits[_first_block(window, blocks) : blocks]):
        for hit in part:
            found = _find(window, hit.key)
            assert found is not None, "the search has found it"
            own.append(found)
        yield len(part)
    return own


def _find(window: PoolState, key: bytes) -> Hit | None:
    if (block := window.device.keys.find(key)) is not None:
        return Hit(key, block, 0)
    if (block := window.host.keys.find(key)) is not None:
        return Hit(key, 0, block)
    return None
