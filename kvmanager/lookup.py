"""Looking a prompt's beginning up in many pools at once: a hint, which reserves and refreshes nothing."""

from array import array
from collections.abc import Generator, Iterable
from typing import NamedTuple

from blocks import prefix_keys
from kvmanager.pool_state import PoolState

# What is done without a pause, in units of a microsecond or less: a key is one for every so many tokens, a look into a
# pool one.
_SLICE = 500
_UNIT_TOKENS = 32


class PrefixHolding(NamedTuple):
    """What one pool holds of a prompt: together, what an allocate of it would find now.

    `device_tokens` are the leading tokens whose blocks are in the device tier. `host_tokens` are those that follow,
    from the first block that is in the host tier only, up to the first one that is in neither tier.
    """

    engine_id: str
    device_tokens: int
    host_tokens: int


class _Search:
    """One pool, as far as the prompt was looked for in it."""

    __slots__ = ("device_blocks", "host_blocks", "state")

    def __init__(self, state: PoolState) -> None:
        self.state = state
        self.device_blocks = 0
        self.host_blocks = 0

    def has(self, key: bytes) -> bool:
        """Look for the next block; return whether it is in either tier."""
        if self.state.device.keys.find(key) is not None:
            if self.host_blocks:
                self.host_blocks += 1
            else:
                self.device_blocks += 1
            return True
        found = self.state.host.keys.find(key) is not None
        self.host_blocks += found
        return found

    def holding(self) -> PrefixHolding:
        size = self.state.block_size
        return PrefixHolding(self.state.spec.engine_id, self.device_blocks * size, self.host_blocks * size)


def look_up(
    pools: Iterable[PoolState], token_ids: "array[int]", salt: bytes = b""
) -> Generator[None, None, list[PrefixHolding]]:
    """Look for a prompt in pools, in short slices; the generator's return value has a holding for each, in order.

    At least one token is left to compute, as for an allocate. Keys are computed once for all pools with the same
    fingerprint, block size and number of resets, and no further than one of them has the prompt. What pools do between
    the slices may be in the answer or not.
    """
    searches = [_Search(state) for state in pools]
    alike: dict[tuple[bytes, int], list[_Search]] = {}
    for search in searches:
        alike.setdefault((search.state.root(salt), search.state.block_size), []).append(search)
    yield
    for (root, block_size), going in alike.items():
        yield from _look_up_alike(going, prefix_keys(root, token_ids, block_size), block_size)
    return [search.holding() for search in searches]


def _look_up_alike(going: list[_Search], keys: Iterable[bytes], block_size: int) -> Generator[None, None, None]:
    done = 0
    for key in keys:
        done += 1 + block_size // _UNIT_TOKENS + len(going)
        going = [search for search in going if search.has(key)]
        if not going:
            break
        if done >= _SLICE:
            done = 0
            yield
    yield
