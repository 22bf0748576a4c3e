"""Prefix lookup in many pools at once. The result is a hint: nothing is reserved or refreshed."""

from array import array
from collections.abc import Generator, Iterable
from typing import NamedTuple

from blocks import prefix_keys
from kvmanager.pool_state import PoolState
from kvmanager.verbs.admission import Hit
from kvmanager.verbs.boundaries import Boundary, finding_boundary

# Work without a pause, in units of at most a microsecond: _UNIT_TOKENS hashed, or one find in a pool.
_SLICE = 500
_UNIT_TOKENS = 32


class PrefixHolding(NamedTuple):
    """The cached prefix of a prompt in one pool, as an allocate would find it now.

    `device_tokens` counts the leading tokens in the device tier. `host_tokens` counts those after them, from the first
    block that is in the host tier only, up to the first block that is in neither tier. With window kinds, both end
    where each kind has what the next token needs.
    """

    engine_id: str
    device_tokens: int
    host_tokens: int


class _Search:
    __slots__ = ("device_blocks", "hits", "host_blocks", "state")

    def __init__(self, state: PoolState) -> None:
        self.state = state
        self.device_blocks = 0
        self.host_blocks = 0
        self.hits: list[Hit] = []  # with window kinds

    def match_next(self, key: bytes) -> bool:
        """Count the prompt's next block if it is cached; return whether it is."""
        found = self._match_next(key)
        if found and self.state.windows:
            self.hits.append(Hit(key, 0, 0))
        return found

    def _match_next(self, key: bytes) -> bool:
        if self.state.device.keys.find(key) is not None:
            if self.host_blocks:
                self.host_blocks += 1
            else:
                self.device_blocks += 1
            return True
        found = self.state.host.keys.find(key) is not None
        self.host_blocks += found
        return found

    def shortening(self) -> Generator[None, None, None]:
        """Cut the found prefix to what each window kind has, in slices."""
        if self.hits:
            boundary = yield from _slices_of(finding_boundary(self.state, self.hits))
            self.device_blocks = min(self.device_blocks, boundary.blocks)
            self.host_blocks = boundary.blocks - self.device_blocks

    def holding(self) -> PrefixHolding:
        size = self.state.block_size
        return PrefixHolding(self.state.spec.engine_id, self.device_blocks * size, self.host_blocks * size)


def lookup_prefix(
    pools: Iterable[PoolState], token_ids: "array[int]", salt: bytes = b""
) -> Generator[None, None, list[PrefixHolding]]:
    """Find the cached prefix of a prompt in each pool, in slices; the return value has one entry per pool, in order.

    At least one token is left to compute, as for an allocate. Keys are computed once for all pools with the same
    fingerprint, block size and number of resets, and only up to the longest match. Changes of a pool between the slices
    may or may not be seen.
    """
    searches = [_Search(state) for state in pools]
    alike: dict[tuple[bytes, int], list[_Search]] = {}
    for search in searches:
        alike.setdefault((search.state.root(salt), search.state.block_size), []).append(search)
    yield
    for (root, block_size), matching in alike.items():
        yield from _lookup_alike(matching, prefix_keys(root, token_ids, block_size), block_size)
    for search in searches:
        yield from search.shortening()
    return [search.holding() for search in searches]


def _slices_of(work: Generator[int, None, Boundary]) -> Generator[None, None, Boundary]:
    while True:
        try:
            next(work)
        except StopIteration as end:
            boundary: Boundary = end.value
            return boundary
        yield


def _lookup_alike(matching: list[_Search], keys: Iterable[bytes], block_size: int) -> Generator[None, None, None]:
    done = 0
    for key in keys:
        done += 1 + block_size // _UNIT_TOKENS + len(matching)
        matching = [search for search in matching if search.match_next(key)]
        if not matching:
            break
        if done >= _SLICE:
            done = 0
            yield
    yield
