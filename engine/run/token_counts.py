"""Token counts for penalties. They stay on the device, where each sampled token is added.

A slot has an int16 for each token of the vocabulary: the sign bit is set if the token is in the prompt, and the other
15 bits count it in the output (at most 32,767: beyond that a penalty no longer grows). 256 slots of 128,256 tokens take
66 MB; 32 bits a token would double the bytes that each step of a penalized sequence reads.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.upload import upload

_MAX_COUNT = (1 << 15) - 1
_IN_PROMPT = -(1 << 15)


@dataclass
class _Slot:
    """A slot in use: it counts the first `position` tokens of a sequence."""

    number: int
    position: int


class TokenCounts:
    """Counts the tokens of up to `slots` sequences; a further sequence takes the slot that was used least recently.

    `table` is `[slots, vocabulary]` int16. The caller adds a sampled token to its slot's row, and calls `advance`.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        """Allocate the slots."""
        self.table = torch.zeros(slots, vocabulary, dtype=torch.int16, device=device)
        self._used: OrderedDict[int, _Slot] = OrderedDict()
        self._free = list(range(slots))

    def holds(self, sequence: int, position: int) -> bool:
        """Return whether the first `position` tokens of a sequence, and no others, are counted."""
        slot = self._used.get(sequence)
        return slot is not None and slot.position == position

    def add(
        self, sequence: int, prompt: Sequence[int], output: Sequence[int], in_use: Collection[int] = frozenset()
    ) -> None:
        """Count a sequence's tokens anew. `in_use` are sequences whose slots must not be reused.

        Raises IndexError for a token outside the vocabulary, and LookupError if there is no slot; both change nothing.
        """
        tokens, values = self._values(prompt, output)
        slot = self._take(sequence, in_use)
        row = self.table[slot.number]
        row.zero_()
        if len(tokens):
            device = self.table.device
            row.index_copy_(0, upload(tokens, torch.int64, device), upload(values, torch.int16, device))
        slot.position = len(prompt) + len(output)

    def release(self, sequence: int) -> None:
        """Free the slot of a sequence, if it has one."""
        slot = self._used.pop(sequence, None)
        if slot is not None:
            self._free.append(slot.number)

    def use(self, sequence: int) -> int:
        """Return the slot of a counted sequence, which becomes the most recently used one."""
        self._used.move_to_end(sequence)
        return self._used[sequence].number

    def advance(self, sequence: int) -> None:
        """Note that a sampled token was added to the slot of a sequence."""
        self._used[sequence].position += 1

    def _values(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[NDArray[np.int64], list[int]]:
        vocabulary = self.table.shape[1]
        for token in (*prompt, *output):
            if not 0 <= token < vocabulary:
                raise IndexError(f"token {token} is not in the vocabulary of {vocabulary} tokens")
        generated, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        values = dict.fromkeys(prompt, _IN_PROMPT)
        for token, count in zip(generated.tolist(), counts.tolist(), strict=True):
            values[token] = values.get(token, 0) + min(count, _MAX_COUNT)
        return np.array(list(values), dtype=np.int64), list(values.values())

    def _take(self, sequence: int, in_use: Collection[int]) -> _Slot:
        slot = self._used.get(sequence)
        if slot is None:
            if not self._free:
                self.release(self._oldest(in_use))
            slot = self._used[sequence] = _Slot(self._free.pop(), 0)
        return slot

    def _oldest(self, in_use: Collection[int]) -> int:
        for sequence in self._used:
            if sequence not in in_use:
                return sequence
        raise LookupError(f"all {len(self.table)} slots of token counts are in use")
