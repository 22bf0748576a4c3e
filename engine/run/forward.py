"""The forward pass of a plan: copies, inputs, logits."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.block_tables import BlockTables
from engine.attention.upload import Integers, upload_together
from engine.gpu.copy_stream import CopyStream, copy_stream_for
from engine.kinds.kinds_backend import backends_of
from engine.model.decoder import Decoder
from engine.run.block_copies import BlockCopies
from engine.run.steady_decoding import Columns, SteadyDecoding, SteadyInputs
from engine.schedule.step_plan import PENDING, PENDING_TOKEN, StepPlan, Work

_NONE = np.zeros(0, dtype=np.int64)


class ForwardPass:
    """Computes the logits of plans, in launch order, with one decoder over the blocks of one backend."""

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        block_size: int,
        device: torch.device,
        copy_stream: CopyStream | None = None,
    ) -> None:
        """Combine the parts; the decoder uses the cache of `backend`. `copy_stream` defaults to the device's."""
        self._decoder = decoder
        self._block_size = block_size
        self._device = device
        self._on_host = device.type == "cpu"
        self._narrow = self._on_host and decoder.integers is np.int32
        self._latest = _NO_TOKENS
        self.columns: Columns | None = None  # of the latest step, if the decoder is native
        self._steady: SteadyDecoding | None = None  # its inputs, if the next step may continue it
        kinds = backends_of(backend)
        self._tables = [BlockTables(device) for _ in kinds]
        stream = copy_stream or copy_stream_for(device)
        self._copies = [BlockCopies(one, stream, block_size, kind) for kind, one in enumerate(kinds)]

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Start a plan's copies, and return the logits of its work, None if it has none. Raises CopyFailed.

        On a GPU all work is queued on the current stream.
        """
        for copies in self._copies:
            copies.make(plan.copies)
        if not plan.work:
            return None
        for copies in self._copies:
            copies.wait_for(plan.work)
        return self.logits(plan.work)

    def keep(self, work: Sequence[Work], tokens: torch.Tensor) -> None:
        """Keep the sampled tokens of the latest step, `[samples]` int64 on the device, for the step after it."""
        if self._steady is not None:
            sequences = self._steady.sequences
        else:
            sequences = tuple([item.sequence for item in work if item.samples for _ in item.sample_indices])
        self._latest = _LatestTokens(sequences, tokens, tokens.numpy() if self._on_host else _NONE)

    def forget(self) -> None:
        """Drop the sampled tokens: the step after it has no pending ones."""
        self._latest = _NO_TOKENS

    def logits(self, work: tuple[Work, ...]) -> torch.Tensor:
        """Return `[rows, vocabulary]` logits: for each work, rows that score its prompt, then one for each sample."""
        if not self._narrow or len(self._tables) > 1:
            return self._decoder.logits(*self._inputs(work))
        self.columns = columns = Columns.of(work)
        steady, self._steady = self._steady, None
        if steady is not None and steady.is_followed_by(columns) and self._advance(steady, columns, work):
            inputs = steady.inputs
        else:
            inputs = self._inputs(work)
            steady = SteadyDecoding(columns, inputs) if columns.decodes else None
        logits = self._decoder.logits(*inputs)
        self._steady = steady  # only now: a step that has failed is not continued
        return logits

    def _advance(self, steady: SteadyDecoding, columns: Columns, work: tuple[Work, ...]) -> bool:
        """Turn the latest step's inputs into the next step's. Return False if the next step's tokens are not known."""
        if columns.pending and self._latest.sequences != columns.sequence:
            return False
        tables = None
        if columns.block_table != steady.tables:
            tables = self._tables[0].select(self._tables[0].update(work), ())
        steady.advance(columns, self._latest.on_host.tolist() if columns.pending else (), tables)
        return True

    def _inputs(self, work: tuple[Work, ...]) -> SteadyInputs:
        tokens = [item.token_ids for item in work]
        layout = _layout(tuple(map(len, tokens)), tuple([len(item.sample_indices) * item.samples for item in work]))
        found = [tables.update(work, kind) for kind, tables in enumerate(self._tables)]
        positions = np.array([item.start for item in work], dtype=np.int64)
        ends = (positions + layout.lengths).astype(np.int32)
        if not layout.decodes:
            positions = positions.repeat(layout.lengths) + layout.offsets
        slots = [self._slots(kind, tables.rows, positions, layout) for kind, tables in enumerate(found)]
        fed, *pending = self._fed_tokens(work, tokens)
        places = _logit_indices(work) if any(item.to_score or item.proposed for item in work) else layout.places
        wide = (fed, positions, places)
        integers: list[Integers] = [one.astype(np.int32) if self._narrow else one for one in wide]
        of_kinds = [(own, *tables.uploads) for own, tables in zip(slots, found, strict=True)]
        arrays = [*integers, layout.first, ends, *chain.from_iterable(of_kinds), *pending]
        on_device = iter(upload_together(arrays, self._device))
        token_ids, position_ids, logit_places, first, lengths = islice(on_device, 5)
        batches = []
        for kind, tables in enumerate(found):
            own_slots, *uploaded = islice(on_device, 1 + len(tables.uploads))
            selected = self._tables[kind].select(tables, uploaded)
            batches.append(PagedBatch(self._block_size, layout.fed, own_slots, first, lengths, selected))
        batch = replace(batches[0], windows=tuple(batches[1:])) if len(batches) > 1 else batches[0]
        if not self._on_host:
            token_ids = self._with_pending(token_ids, list(on_device))
        return SteadyInputs(token_ids, position_ids, logit_places, batch)

    def _slots(
        self, kind: int, rows: NDArray[np.int64], positions: NDArray[np.int64], layout: "_Layout"
    ) -> NDArray[np.int64]:
        """Return `[tokens]` int64 slots of the fed tokens in a kind of blocks."""
        if not layout.decodes:
            rows = rows.repeat(layout.lengths)
        columns = positions // self._block_size
        found: NDArray[np.int64] = (self._tables[kind].host[rows, columns] - columns) * self._block_size + positions
        return found

    def _fed_tokens(self, work: tuple[Work, ...], tokens: list[tuple[int, ...]]) -> list[NDArray[np.int64]]:
        """Return a step's token ids. On the host they include the pending tokens, which the latest step has sampled.

        On a device, two lists of indices follow: of the pending tokens in this step, and of the same tokens among those
        of the latest step. If this step feeds exactly the latest step's tokens in their order, as most steps do, only
        an empty array is returned.
        """
        pending = tokens.count(PENDING_TOKEN)
        if pending == len(work) and self._latest.sequences == tuple([item.sequence for item in work]):
            return [self._latest.on_host]
        token_ids = np.array(list(chain.from_iterable(tokens)), dtype=np.int64)
        if not pending:
            return [token_ids]
        rows = self._latest.rows()
        sources = np.array([rows[item.sequence] for item in work if item.token_ids == PENDING_TOKEN], dtype=np.int64)
        targets = (token_ids == PENDING).nonzero()[0]
        if self._on_host:
            token_ids[targets] = self._latest.on_host[sources]
            return [token_ids]
        return [token_ids, targets, sources]

    def _with_pending(self, token_ids: torch.Tensor, pending: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the token ids of a step, from `_fed_tokens` on the device."""
        if not len(token_ids):
            return self._latest.tokens.to(token_ids.dtype)
        if pending:
            targets, sources = pending
            token_ids[targets] = self._latest.tokens[sources].to(token_ids.dtype)
        return token_ids


class _Layout(NamedTuple):
    """What follows from the numbers of tokens and of samples of each work alone; equal in most steps of decoding.

    `first` `[works + 1]` int32 and `places` `[rows]` int64: see PagedBatch and Decoder. `offsets` `[tokens]` int64: the
    index of each token in its work. `decodes`: each work has one token.
    """

    fed: tuple[int, ...]
    lengths: NDArray[np.int64]
    first: NDArray[np.int32]
    offsets: NDArray[np.int64]
    places: NDArray[np.int64]
    decodes: bool


@lru_cache(maxsize=4)
def _layout(fed: tuple[int, ...], samples: tuple[int, ...]) -> _Layout:
    lengths = np.array(fed, dtype=np.int64)
    first = np.array([0, *accumulate(fed)], dtype=np.int64)
    offsets = np.arange(first[-1]) - first[:-1].repeat(lengths)
    places = (first[1:] - 1).repeat(np.array(samples, dtype=np.int64))
    return _Layout(fed, lengths, first.astype(np.int32), offsets, places, decodes=set(fed) == {1})


def _logit_indices(work: tuple[Work, ...]) -> NDArray[np.int64]:
    """Return the indices in the flattened batch whose logits are needed."""
    places: list[int] = []
    fed = 0
    for item in work:
        if part := item.to_score:
            first = fed + part.position - 1 - item.start
            places += range(first, first + len(part.token_ids))
        fed += len(item.token_ids)
        if item.samples:
            places += [fed - 1 - item.proposed] * len(item.sample_indices)
            places += range(fed - item.proposed, fed)
    return np.array(places, dtype=np.int64)


class _LatestTokens(NamedTuple):
    """Tokens sampled by the latest step, on the device: `tokens` `[samples]` int64, and the sequence of each.

    `on_host` are the same on the host if the device is a CPU, else empty.
    """

    sequences: Sequence[int]
    tokens: torch.Tensor
    on_host: NDArray[np.int64] = _NONE

    def rows(self) -> dict[int, int]:
        """Return the first row of each sequence. Only a step launched ahead needs them."""
        return {sequence: row for row, sequence in reversed(list(enumerate(self.sequences)))}


_NO_TOKENS = _LatestTokens((), torch.empty(0, dtype=torch.int64))
