"""The blocks that KV events say an engine has, and which batches are missing."""

from collections import defaultdict
from collections.abc import Sequence

from services.engine.events.zeromq.vllm_format import AllBlocksCleared, BlockStored, WireEvent, hashes, place_of

WirePlace = tuple[int, str]


class HeldBlocks:
    """Hashes of blocks by the number of their kind and their medium."""

    def __init__(self) -> None:
        self.places: defaultdict[WirePlace, set[int]] = defaultdict(set)

    def apply(self, events: Sequence[WireEvent]) -> None:
        """Apply the events of a batch, in order."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.places.clear()
            elif isinstance(event, BlockStored):
                self.places[place_of(event)].update(hashes(event))
            else:
                self.places[place_of(event)].difference_update(hashes(event))

    def counts(self) -> dict[WirePlace, int]:
        """Return the number of blocks in each place that has some."""
        return {place: len(found) for place, found in sorted(self.places.items()) if found}


class Follower:
    """Applies batches in the order of their numbers, and finds gaps and restarts of the publisher.

    `held` has the blocks as of the batch before `expected`; None: no batch was applied. `lost` counts the batches that
    were neither received live nor replayed.
    """

    def __init__(self) -> None:
        self.held = HeldBlocks()
        self.expected: int | None = None
        self.lost = 0
        self.restarts = 0
        self._in_snapshot = False
        self._received = -1

    def missing(self, sequence: int) -> int | None:
        """Return the first number to replay before a live batch can be applied, None if none is missing.

        A publisher's numbers only rise: a lower one is of another process, and the blocks of the earlier one are gone.
        """
        if sequence <= self._received:
            self.restarts += 1
            self.restart()
        self._received = sequence
        if self.expected is None:
            return 0
        return self.expected if sequence > self.expected else None

    def apply(self, sequence: int, events: Sequence[WireEvent], *, replayed: bool = False) -> bool:
        """Apply a live or replayed batch; return False if it was applied before."""
        if self.expected is not None and sequence < self.expected:
            return False
        self._in_snapshot = replayed and (self._in_snapshot or _clears(events))
        if self.expected is not None and not self._in_snapshot:
            self.lost += sequence - self.expected
        self.held.apply(events)
        self.expected = sequence + 1
        return True

    def restart(self) -> None:
        """Drop the blocks and the position; counts stay."""
        self.held = HeldBlocks()
        self.expected = None


def _clears(events: Sequence[WireEvent]) -> bool:
    return bool(events) and isinstance(events[0], AllBlocksCleared)
