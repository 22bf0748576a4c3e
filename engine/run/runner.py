"""Executes plans on one device: copies, forward, sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.upload import Download, upload
from engine.gpu.copy_stream import CopyStream, copy_stream_for
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loaded import LoadedModel
from engine.run.block_copies import BlockCopies
from engine.run.continuations import continuations
from engine.run.isolation import sample_separately
from engine.run.logprobs import score
from engine.run.sample_timer import Mark, SampleTimer, seconds_between
from engine.run.sampling import Draw, sample, sample_on_device
from engine.schedule.step_plan import PENDING, Done, Launched, Sampled, StepPlan, Work


class ModelRunner:
    """Runs a model's steps over the blocks of one attention backend."""

    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        block_size: int,
        copy_stream: CopyStream | None = None,
        decoder: Decoder | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Combine the parts. `copy_stream` defaults to the one for the model's device.

        A `decoder` replaces the model's modules; it uses the cache of the same backend. On a CPU, `clock` (seconds)
        measures the sampling.
        """
        self._decoder = decoder or ModulesDecoder(loaded, backend)
        self._block_size = block_size
        self._device: torch.device = loaded.device
        self._latest = _LatestTokens(())
        self._timer = SampleTimer(self._device, clock)
        self._copies = BlockCopies(backend, copy_stream or copy_stream_for(self._device), block_size)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start block copies and the forward pass, behind the steps launched before. Raises CopyFailed.

        On a GPU all work is queued on the current stream, where only plain tokens are sampled; other steps have ended
        when this returns.
        """
        self._copies.make(plan.copies)
        if not plan.work:
            return Done([])
        self._copies.wait_for(plan.work)
        logits = self.forward(plan.work)
        started = self._timer.mark()
        if not all(map(_is_plain, plan.work)):
            self._latest = _LatestTokens(())
            results = _results_of(logits, plan.work)
            return _HostTokens(started, self._timer.mark(), results)
        try:
            tokens = sample_on_device(logits, [draw for work in plan.work for draw in _draws(work)])
        except Exception as failure:
            results = sample_separately(logits, plan.work, outcomes, failure)
            tokens = upload([one.token_id for one in results], torch.int64, self._device)
            self._latest = _LatestTokens(plan.work, tokens)
            return _HostTokens(started, self._timer.mark(), results)
        self._latest = _LatestTokens(plan.work, tokens)
        return _DeviceTokens(started, self._timer.mark(), Download(tokens))

    def forward(self, work: tuple[Work, ...]) -> torch.Tensor:
        """Return `[rows, vocabulary]` logits: for each work, rows that score its prompt, then one for each sample."""
        token_ids = [token for item in work for token in item.token_ids]
        positions = [position for item in work for position in range(item.start, item.end)]
        inputs = self._upload_columns(token_ids, positions, self._logit_indices(work))
        self._insert_pending(inputs[0], token_ids, work)
        return self._decoder.logits(*inputs, PagedBatch.of(work, self._block_size, self._device))

    def _upload_columns(
        self, token_ids: list[int], positions: list[int], places: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return three tensors of the decoder's integers. On a CPU they are parts of one array, which costs less.

        On a GPU they are not, because Triton compiles kernels again for tensors that are not aligned.
        """
        if self._device.type != "cpu":
            known, placed, chosen = (upload(one, torch.int64, self._device) for one in (token_ids, positions, places))
            return known, placed, chosen
        values = np.array([*token_ids, *positions, *places], dtype=self._decoder.integers)
        fed = len(token_ids)
        parts = values[:fed], values[fed : 2 * fed], values[2 * fed :]
        return torch.from_numpy(parts[0]), torch.from_numpy(parts[1]), torch.from_numpy(parts[2])

    def _logit_indices(self, work: tuple[Work, ...]) -> list[int]:
        """Return the indices in the flattened batch whose logits are needed."""
        places: list[int] = []
        fed = 0
        for item in work:
            if part := item.to_score:
                first = fed + part.position - 1 - item.start
                places += range(first, first + len(part.token_ids))
            fed += len(item.token_ids)
            if item.samples:
                places += [fed - 1] * len(item.sample_indices)
        return places

    def _insert_pending(self, known: torch.Tensor, token_ids: list[int], work: tuple[Work, ...]) -> None:
        """Copy the pending ones of the input token ids from the latest step, on the device."""
        pending = [item.sequence for item in work if item.token_ids == (PENDING,)]
        if pending:
            rows = self._latest.rows()
            drawn = self._latest.tokens[upload([rows[one] for one in pending], torch.int64, self._device)]
            places = [place for place, token in enumerate(token_ids) if token == PENDING]
            known[upload(places, torch.int64, self._device)] = drawn.to(known.dtype)


class _LatestTokens(NamedTuple):
    """Tokens sampled by the latest step, on the device: `tokens` `[samples]` int64, and the step's work."""

    work: Sequence[Work]
    tokens: torch.Tensor = torch.empty(0, dtype=torch.int64)

    def rows(self) -> dict[int, int]:
        """Return the first row of each sequence. Only a step launched ahead needs them."""
        sampling = [item for item in self.work if item.samples]
        places = accumulate((len(item.sample_indices) for item in sampling), initial=0)
        return {item.sequence: place for item, place in zip(sampling, places, strict=False)}


@dataclass(frozen=True)
class _Sampling:
    """A step whose sampling is between two marks."""

    started: Mark
    sampled: Mark

    def sample_seconds(self) -> float:
        return seconds_between(self.started, self.sampled)


@dataclass(frozen=True)
class _DeviceTokens(_Sampling):
    """A step whose tokens are being copied to the host."""

    tokens: Download

    def result(self) -> list[Sampled]:
        return [Sampled(token) for token in self.tokens.wait()]


@dataclass(frozen=True)
class _HostTokens(_Sampling):
    """A step whose tokens are on the host."""

    results: list[Sampled]

    def result(self) -> list[Sampled]:
        return self.results


class _Row(NamedTuple):
    """One row of logits: sampled, scored, or expanded for a beam.

    A token is sampled (`draw`) or known (`token_id`), and scored if `logprobs` is set. A row of a `beam` has many
    continuations instead.
    """

    draw: Draw | None = None
    token_id: int = 0
    logprobs: int | None = None
    beam: Work | None = None


def _results_of(logits: torch.Tensor, work: Sequence[Work]) -> list[Sampled]:
    """Return the results of the logits. An exception raised for one request does not affect the others."""
    try:
        return outcomes(logits, work)
    except Exception as failure:
        return sample_separately(logits, work, outcomes, failure)


def outcomes(logits: torch.Tensor, work: Sequence[Work]) -> list[Sampled]:
    """Return the results of a step from the logits of `forward`."""
    rows = [row for item in work for row in _rows(item)]
    beams = [row.beam for row in rows if row.beam is not None]
    if not beams:
        return _tokens(logits, rows)
    found = continuations(
        _select(logits, [row.beam is not None for row in rows]),
        [beam.rules for beam in beams],
        [beam.candidates for beam in beams],
    )
    others = [row for row in rows if row.beam is None]
    tokens = iter(_tokens(_select(logits, [row.beam is None for row in rows]), others) if others else [])
    beam_tokens = iter(found)
    return [next(tokens) if row.beam is None else next(beam_tokens) for row in rows]


def _tokens(logits: torch.Tensor, rows: Sequence[_Row]) -> list[Sampled]:
    """Return a token for each row that is not a beam's, with log-probabilities if requested."""
    draws = [row.draw for row in rows if row.draw]
    drawn = iter(sample(_select(logits, [row.draw is not None for row in rows]), draws) if draws else [])
    tokens = [next(drawn) if row.draw else row.token_id for row in rows]
    asked = [(token, row.logprobs) for token, row in zip(tokens, rows, strict=True) if row.logprobs is not None]
    if not asked:
        return [Sampled(token) for token in tokens]
    scores = iter(score(_select(logits, [row.logprobs is not None for row in rows]), *zip(*asked, strict=True)))
    return [Sampled(token) if row.logprobs is None else next(scores) for token, row in zip(tokens, rows, strict=True)]


def _is_plain(work: Work) -> bool:
    """Return whether the results are sampled tokens only, without scores or candidates."""
    return work.to_score is None and not work.candidates and (work.logprobs is None or not work.samples)


def _rows(work: Work) -> list[_Row]:
    part = work.to_score
    rows = [_Row(None, token, part.logprobs) for token in part.token_ids] if part else []
    if work.samples and work.candidates:
        rows.append(_Row(beam=work))
    elif work.samples:
        rows += [_Row(draw, 0, work.logprobs) for draw in _draws(work)]
    return rows


def _draws(work: Work) -> list[Draw]:
    if not work.samples:
        return []
    end = work.end
    return [Draw(work.sampling, index, end, work.rules) for index in work.sample_indices]


def _select(logits: torch.Tensor, chosen: list[bool]) -> torch.Tensor:
    """Return the chosen rows, without a copy if all are chosen."""
    return logits if all(chosen) else logits[torch.tensor(chosen, device=logits.device)]
