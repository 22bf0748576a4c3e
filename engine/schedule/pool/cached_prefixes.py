"""A hint of what the prefix cache contains: blocks of prompts that were committed or hit, and not granted since.

The block manager finds a prefix when it allocates, after the engine has planned who waits for whom. So the engine
records which blocks received or had a key. A block is forgotten when it is granted anew, so there are at most as many
entries as device blocks. Nothing depends on a hint being right: without one a request waits for one answer, and a wrong
one costs a recomputation.
"""

from collections.abc import Iterable, Sequence


def chained_hashes(salt: bytes, token_ids: Sequence[int], block_size: int) -> list[int]:
    """Return a link for each full block: the hash of its tokens and of the link before, of `salt` at first."""
    links: list[int] = []
    link = hash(salt)
    for end in range(block_size, len(token_ids) + 1, block_size):
        link = hash((link, *token_ids[end - block_size : end]))
        links.append(link)
    return links


class CachedPrefixes:
    """Device blocks by the link of a chained hash, see `chained_hashes`."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._links: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def record(self, link: int, block: int) -> None:
        """Record that a block has a key."""
        if self._blocks.get(link) != block:
            self.forget_links((link,))
            self.forget_block(block)
            self._blocks[link], self._links[block] = block, link

    def find(self, links: Sequence[int]) -> list[int]:
        """Return the blocks of the leading links that are recorded."""
        found: list[int] = []
        for link in links:
            if (block := self._blocks.get(link)) is None:
                break
            found.append(block)
        return found

    def forget_block(self, block: int) -> None:
        """Forget a block that is granted anew."""
        if (link := self._links.pop(block, None)) is not None:
            del self._blocks[link]

    def forget_links(self, links: Iterable[int]) -> None:
        """Forget blocks that were not found in the cache."""
        for link in links:
            if (block := self._blocks.pop(link, None)) is not None:
                del self._links[block]

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._links.clear()
