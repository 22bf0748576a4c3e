"""What cached blocks must contain: the digests of their keys' tokens, from the requests alone."""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from blocks import block_keys
from kvmanager import Pool
from kvmanager.tier.tier import Tier
from simulation.digest_memory import DigestMemory, FlippedSlots, chain

Digests = tuple[int, ...]
RootOf = Callable[[int], bytes]


class ExpectedContents:
    """The digests of each block of each known text, by key; a text is a list of tokens behind a root.

    A root is the parent of a text's first key: another one for each salt and each number of resets.
    """

    def __init__(self) -> None:
        self._by_key: dict[int, dict[bytes, Digests]] = {}  # by block size
        self._texts: list[tuple[bytes, Sequence[int]]] = []
        self._requested: list[tuple[RootOf, Sequence[int]]] = []
        self._resets = 0

    def add(self, root: bytes, text: Sequence[int]) -> None:
        """Add a text that an engine may compute behind a root."""
        self._texts.append((root, text))
        for block_size, by_key in self._by_key.items():
            by_key.update(_blocks_of(root, text, block_size))

    def add_requested(self, root_of: "RootOf", text: Sequence[int]) -> None:
        """Add a text that an engine may compute after any number of resets. `root_of` returns the root of a number."""
        self._requested.append((root_of, text))
        for resets in range(self._resets + 1):
            self.add(root_of(resets), text)

    def follow(self, resets: int) -> None:
        """Add the texts of requests behind the roots of this number of resets, and of all lower ones."""
        while self._resets < resets:
            self._resets += 1
            for root_of, text in self._requested:
                self.add(root_of(self._resets), text)

    def of_key(self, block_size: int, key: bytes) -> Digests | None:
        """Return the digests of a key, None if no known text has it."""
        return self._of(block_size).get(key)

    def pool_faults(self, pool: Pool, memory: DigestMemory) -> list[str]:
        """Return a message for each keyed block of either tier whose contents are not those of its key.

        Flipped slots are left out.
        """
        self.follow(pool.state.resets)
        found = []
        for state, one in zip(pool.state.kinds, memory.kinds, strict=True):
            kind = f"{state.kind_name} " if state.kind_name else ""
            for host, tier, contents in ((False, state.device, one.device), (True, state.host, one.host)):
                name = f"{kind}host block" if host else f"{kind}block"
                found += self._faults(tier, contents, name, one.flipped, host=host)
        return found

    def _faults(self, tier: Tier, contents: torch.Tensor, name: str, flipped: FlippedSlots, *, host: bool) -> list[str]:
        found = []
        block_size = contents.shape[1]
        by_key = self._of(block_size)
        for block in range(1, tier.total + 1):
            key = tier.key(block)
            if key is None:
                continue
            held, expected = tuple(contents[block].tolist()), by_key.get(key)
            if differ(held, expected, flipped.of(host, block)):
                found.append(f"{name} {block} is found by a key, but contains {held} in place of {expected}")
        return found

    def _of(self, block_size: int) -> dict[bytes, Digests]:
        if block_size not in self._by_key:
            by_key = self._by_key[block_size] = {}
            for root, text in self._texts:
                by_key.update(_blocks_of(root, text, block_size))
        return self._by_key[block_size]


def differ(held: Digests, expected: Digests | None, flipped: Collection[int] = ()) -> bool:
    """Return whether digests differ from the expected ones in other slots than flipped ones."""
    if expected is None:
        return len(flipped) < len(held)
    return any(one != own for slot, (one, own) in enumerate(zip(held, expected, strict=True)) if slot not in flipped)


def _blocks_of(root: bytes, text: Sequence[int], block_size: int) -> Iterable[tuple[bytes, Digests]]:
    digests = list(chain(0, text))
    for number, key in enumerate(block_keys(root, text, block_size)):
        yield key, tuple(digests[number * block_size : (number + 1) * block_size])
