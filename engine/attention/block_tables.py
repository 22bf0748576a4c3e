"""The block tables of running sequences, kept from step to step: only blocks that changed are written.

Whole tables would be most of a step's input: 256 sequences of 1,024 tokens have 16,384 blocks, of which a step changes
about 16. A sequence keeps a row until its row is needed for another.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.upload import Integers
from engine.schedule.step_plan import Work

_ROWS, _BLOCKS = 16, 16  # of the first table
_NOTHING = np.zeros(0, dtype=np.int64)

Table = tuple[int, ...]


class TableRows(NamedTuple):
    """The tables of one step: `rows` `[sequences]` int64 of the kept table, of which `width` blocks are needed.

    `uploads` is what `select` needs on a device that is no CPU: `rows`; `[changes]` int64, the flat indices of the
    blocks to write; and `[changes]` int32, their ids.
    """

    rows: NDArray[np.int64]
    width: int
    uploads: tuple[Integers, ...] = ()


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
        self._sequences: list[int] = []  # of the latest step,
        self._step_rows: list[int] = []  # their rows,
        self._rows_array = np.zeros(0, dtype=np.int64)
        self._selected: torch.Tensor | None = None  # and their tables, until one of them changes

    def update(self, work: Sequence[Work], kind: int = 0) -> TableRows:
        """Write a kind's tables of a step's work on the host, and return what changed since the last `select`."""
        sequences = [item.sequence for item in work]
        tables = [item.window_tables[kind - 1] if kind else item.block_table for item in work]
        width = max(map(len, tables), default=0)
        if sequences != self._sequences or width > self.host.shape[1]:
            self._place(sequences, width)
        held = self._tables
        for row, table in zip(self._step_rows, tables, strict=True):
            if held[row] is not table:  # the same object as in the step before, if nothing changed
                self._changed.append(self._write(row, table))
                self._selected = None
        if self._on_host:
            return TableRows(self._rows_array, width)
        changed = self._changed
        if self._on_device is None:  # all of it is new there
            changed = [np.arange(self.host.size)]
        places = np.concatenate(changed) if changed else _NOTHING
        return TableRows(self._rows_array, width, (self._rows_array, places, self.host.reshape(-1)[places]))

    def select(self, found: TableRows, uploaded: Sequence[torch.Tensor]) -> torch.Tensor:
        """Write what changed on the device, and return `[sequences, width]` int32 tables of the step.

        `uploaded` are the uploads of `found` on the device. The tensor is the same while no table changes.
        """
        if self._selected is None and self._on_host:
            self._selected = torch.from_numpy(self.host[found.rows, : found.width])
        elif self._selected is None:
            self._selected = self._select_on_device(found, *uploaded)
        self._changed = []  # only now: a step that fails before has written nothing
        return self._selected

    @torch.inference_mode()
    def _select_on_device(
        self, found: TableRows, rows: torch.Tensor, changed: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if self._on_device is None:
            self._on_device = torch.zeros(self.host.shape, dtype=torch.int32, device=self._device)
        if len(changed):
            self._on_device.view(-1).index_copy_(0, changed, values)
        return self._on_device[:, : found.width].index_select(0, rows)

    def _place(self, sequences: list[int], width: int) -> None:
        """Give each sequence of a step a row."""
        if width > self.host.shape[1] or sum(one not in self._rows for one in sequences) > len(self._free):
            self._make_room(set(sequences), width)
        for one in sequences:
            if one not in self._rows:
                self._rows[one] = self._free.pop()
        self._sequences, self._step_rows = sequences, [self._rows[one] for one in sequences]
        self._rows_array = np.array(self._step_rows, dtype=np.int64)
        self._selected = None

    def _write(self, row: int, table: Table) -> NDArray[np.int64]:
        """Write one table into its row; return the flat indices of what changed."""
        before = self._tables[row]
        kept = len(before) if table[: len(before)] == before else 0
        end = max(len(before), len(table))
        self.host[row, kept : len(table)] = table[kept:]
        self.host[row, len(table) : end] = 0
        self._tables[row] = table
        first = row * self.host.shape[1]
        return np.arange(first + kept, first + end)

    def _make_room(self, needed: Set[int], widest: int) -> None:
        """Take the rows of other sequences, and double the table where it is too small."""
        for sequence in [one for one in self._rows if one not in needed]:
            self._free.append(self._rows.pop(sequence))
        count, width = self.host.shape
        if len(needed) <= count and widest <= width:
            return
        while count < len(needed):
            count *= 2
        while width < widest:
            width *= 2
        self.host = np.zeros((count, width), dtype=np.int32)
        self._on_device = None
        self._rows, self._tables, self._free = {}, [()] * count, list(range(count))
