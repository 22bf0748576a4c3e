"""The blocks that an engine has announced: built from slices of a snapshot while events go on."""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from services.engine.events.changes import Cleared, KeyChange, Place, Removed, Stored
from services.engine.events.event_stream import MOST_BLOCKS


class _Block(NamedTuple):
    parent: bytes | None
    token_ids: "array[int]"
    salt: str


class BlockSet:
    """Blocks by place and key. The last change of a key counts, so slices and events may repeat each other."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[Place, bytes], _Block] = {}

    def __len__(self) -> int:
        """Return the number of blocks, of all places."""
        return len(self._blocks)

    def apply(self, changes: Iterable[KeyChange]) -> None:
        """Take changes, in their order."""
        for change in changes:
            match change:
                case Stored():
                    self._add(change)
                case Removed(place, keys):
                    for key in keys:
                        self._blocks.pop((place, key), None)
                case Cleared():
                    self._blocks.clear()

    def parts(self) -> Iterator[list[KeyChange]]:
        """Yield the blocks in parts of MOST_BLOCKS at most, parents first, beginning with Cleared.

        A key keeps its position in the dict until it is removed, and its children are removed with it.
        """
        part: list[KeyChange] = [Cleared()]
        blocks = 0
        for chain in self._chains():
            if blocks + len(chain.keys) > MOST_BLOCKS:
                yield part
                part, blocks = [], 0
            part.append(chain)
            blocks += len(chain.keys)
        yield part

    def _add(self, stored: Stored) -> None:
        parent = stored.parent
        for key, token_ids in zip(stored.keys, stored.token_ids, strict=True):
            self._blocks[stored.place, key] = _Block(parent, token_ids, stored.salt)
            parent = key

    def _chains(self) -> Iterator[Stored]:
        """Yield the blocks, each with those behind it in the dict that continue it."""
        chain: list[tuple[bytes, _Block]] = []
        place = None
        for (own_place, key), block in self._blocks.items():
            if chain and not (own_place == place and _continues(chain, block)):
                yield _stored(chain, place)
                chain = []
            place = own_place
            chain.append((key, block))
        if chain:
            yield _stored(chain, place)


def _continues(chain: list[tuple[bytes, _Block]], block: _Block) -> bool:
    key, last = chain[-1]
    return block.parent == key and block.salt == last.salt and len(chain) < MOST_BLOCKS


def _stored(chain: list[tuple[bytes, _Block]], place: Place | None) -> Stored:
    assert place is not None, "a chain has a place"
    first = chain[0][1]
    return Stored(place, first.parent, [key for key, _ in chain], [one.token_ids for _, one in chain], first.salt)
