"""The block tables of running sequences, kept from step to step: only blocks that changed are written.

Whole tables would be most of a step's input: 256 sequences of 1,024 tokens have 16,384 blocks, of which a step changes
about 16. A sequence keeps a row until its row is needed for another.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.schedule.step_plan import Work

_ROWS, _BLOCKS = 16, 16  # of the first table
_NOTHING = np.zeros(0, dtype=np.int64)

Table = tuple[int, ...]


class TableRows(NamedTuple):
    """The tables of one step: `rows` `[sequences]` int64 of the kept table, of which `width` blocks are needed.

    `changed` `[changes]` int64 are the flat indices of the blocks to write, and `values` `[changes]` int32 their ids.
    """

    rows: NDArray[np.int64]
    width: int
    changed: NDArray[np.int64]
    values: NDArray[np.int32]


class BlockTables:
    """The table on the host, `[rows, blocks]` int32, and a copy on a device that is no CPU.

    Entries behind the end of a sequence's table are 0.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without sequences."""
        self.host = np.zeros((_ROWS, _BLOCKS), dtype=np.int32)
        self._device = device
        self._on_host = device.type == "cpu"
        self._on_device: torch.Tensor | None = None
        self._rows: dict[int, int] = {}  # by sequence
        self._tables: list[Table] = [()] * _ROWS  # as they stand in each row
        self._free = list(range(_ROWS))
        self._changed: list[NDArray[np.int64]] = []

    def update(self, work: Sequence[Work]) -> TableRows:
        """Write the tables of a step's work on the host, and return what changed since the last `select`."""
        rows: list[int] = []
        known, tables = self._rows, self._tables
        for item in work:
            table = item.block_table
            row = known.get(item.sequence, -1)
            if row < 0 or tables[row] is not table:  # the same object as in the step before, if nothing changed
                if len(table) > self.host.shape[1] or (row < 0 and not self._free):
                    self._make_room(work)
                    return self.update(work)
                self._changed.append(self._write(item))
                row = known[item.sequence]
            rows.append(row)
        width = max([len(item.block_table) for item in work], default=0)
        changed = self._changed
        if self._on_device is None and not self._on_host:  # all of it is new there
            changed = [np.arange(self.host.size)]
        places = np.concatenate(changed) if changed and not self._on_host else _NOTHING
        return TableRows(np.array(rows, dtype=np.int64), width, places, self.host.reshape(-1)[places])

    @torch.inference_mode()
    def select(self, rows: torch.Tensor, width: int, changed: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write what changed on the device, and return `[sequences, width]` int32 tables of these rows."""
        if self._on_host:
            self._changed = []
            return torch.from_numpy(self.host)[:, :width].index_select(0, rows)
        if self._on_device is None:
            self._on_device = torch.zeros(self.host.shape, dtype=torch.int32, device=self._device)
        if len(changed):
            self._on_device.view(-1).index_copy_(0, changed, values)
        self._changed = []  # only now: a step that fails before has written nothing
        return self._on_device[:, :width].index_select(0, rows)

    def _write(self, item: Work) -> NDArray[np.int64]:
        """Write one table into its row, or a free one; return the flat indices of what changed."""
        row = self._rows.get(item.sequence, -1)
        if row < 0:
            row = self._rows[item.sequence] = self._free.pop()
        before, table = self._tables[row], item.block_table
        kept = len(before) if table[: len(before)] == before else 0
        end = max(len(before), len(table))
        self.host[row, kept : len(table)] = table[kept:]
        self.host[row, len(table) : end] = 0
        self._tables[row] = table
        first = row * self.host.shape[1]
        return np.arange(first + kept, first + end)

    def _make_room(self, work: Sequence[Work]) -> None:
        """Take the rows of other sequences, and double the table where it is too small."""
        needed = {item.sequence for item in work}
        for sequence in [one for one in self._rows if one not in needed]:
            self._free.append(self._rows.pop(sequence))
        count, width = self.host.shape
        widest = max([len(item.block_table) for item in work], default=0)
        if len(needed) <= count and widest <= width:
            return
        while count < len(needed):
            count *= 2
        while width < widest:
            width *= 2
        self.host = np.zeros((count, width), dtype=np.int32)
        self._on_device = None
        self._rows, self._tables, self._free = {}, [()] * count, list(range(count))
