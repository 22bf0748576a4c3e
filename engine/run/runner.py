"""Executes plans on one device: copies, forward, sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.upload import Download, upload
from engine.gpu.copy_stream import CopyStream, copy_stream_for
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loading import LoadedModel
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
        """Put the parts together. Without a `copy_stream` it is the one for the model's device.

        A `decoder` runs the model's steps instead of its modules, over the cache of the same backend. By the `clock`,
        in seconds, the sampling is measured on a CPU.
        """
        self._decoder = decoder or ModulesDecoder(loaded, backend)
        self._block_size = block_size
        self._device: torch.device = loaded.model.device
        self._drawn = _Drawn({})
        self._timer = SampleTimer(self._device, clock)
        self._copies = BlockCopies(backend, copy_stream or copy_stream_for(self._device), block_size)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Begin to copy blocks and to compute the fed tokens, behind the steps launched before. Raises CopyFailed.

        On a GPU all of it is queued on the current stream, where each token is drawn by nothing but numbers; else the
        step has ended when this returns.
        """
        self._copies.make(plan.copies)
        if not plan.work:
            return Done([])
        self._copies.wait_for(plan.work)
        logits = self.forward(plan.work)
        begun = self._timer.mark()
        if not all(map(_is_plain, plan.work)):
            self._drawn = _Drawn({})
            results = _brought(logits, plan.work)
            return _Known(begun, self._timer.mark(), results)
        rows = [row for work in plan.work for row in _rows(work)]
        try:
            tokens = sample_on_device(logits, [row.draw for row in rows if row.draw])
        except Exception as failure:
            results = sample_separately(logits, plan.work, outcomes, failure)
            self._remember_sampled(plan.work, upload([one.token_id for one in results], torch.int64, self._device))
            return _Known(begun, self._timer.mark(), results)
        self._remember_sampled(plan.work, tokens)
        return _DeviceTokens(begun, self._timer.mark(), Download(tokens))

    def _remember_sampled(self, work: Sequence[Work], tokens: torch.Tensor) -> None:
        """Remember where the tokens of each sequence are: a step launched ahead may be fed them."""
        sampling = [item for item in work if item.samples]
        places = accumulate((len(item.sample_indices) for item in sampling), initial=0)
        self._drawn = _Drawn({item.sequence: place for item, place in zip(sampling, places, strict=False)}, tokens)

    def forward(self, work: tuple[Work, ...]) -> torch.Tensor:
        """Return `[rows, vocabulary]` logits: for each work, those that score its prompt, then one for each sample."""
        token_ids = [token for item in work for token in item.token_ids]
        positions = [position for item in work for position in range(item.start, item.end)]
        return self._decoder.logits(
            self._known(token_ids, work),
            upload(positions, torch.int64, self._device),
            upload(self._places(work), torch.int64, self._device),
            PagedBatch.of(work, self._block_size, self._device),
        )

    def _places(self, work: tuple[Work, ...]) -> list[int]:
        """Return the places in the flattened batch whose logits are needed."""
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

    def _known(self, token_ids: list[int], work: tuple[Work, ...]) -> torch.Tensor:
        """Return the fed tokens; those that are pending are on the device already."""
        known = upload(token_ids, torch.int64, self._device)
        pending = [item.sequence for item in work if item.token_ids == (PENDING,)]
        if pending:
            drawn = self._drawn.tokens[upload([self._drawn.rows[one] for one in pending], torch.int64, self._device)]
            places = [place for place, token in enumerate(token_ids) if token == PENDING]
            known[upload(places, torch.int64, self._device)] = drawn
        return known


class _Drawn(NamedTuple):
    """What the latest step sampled, on the device: `tokens` `[samples]` int64, and each sequence's first row of it."""

    rows: dict[int, int]
    tokens: torch.Tensor = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class _Sampling:
    """A step whose sampling is between two marks."""

    begun: Mark
    sampled: Mark

    def sample_seconds(self) -> float:
        return seconds_between(self.begun, self.sampled)


@dataclass(frozen=True)
class _DeviceTokens(_Sampling):
    """A step whose tokens come to the host once it has ended."""

    tokens: Download

    def result(self) -> list[Sampled]:
        return [Sampled(token) for token in self.tokens.wait()]


@dataclass(frozen=True)
class _Known(_Sampling):
    """A step whose tokens the host has waited for."""

    results: list[Sampled]

    def result(self) -> list[Sampled]:
        return self.results


class _Row(NamedTuple):
    """What is made of one row of logits.

    A token is drawn or known already, and scored where that is asked for; or it is the work of a beam, which goes on
    with many.
    """

    draw: Draw | None = None
    token_id: int = 0
    logprobs: int | None = None
    beam: Work | None = None


def _brought(logits: torch.Tensor, work: Sequence[Work]) -> list[Sampled]:
    """Return the outcomes of the logits; what one request asks for may raise, without harm to the others."""
    try:
        return outcomes(logits, work)
    except Exception as failure:
        return sample_separately(logits, work, outcomes, failure)


def outcomes(logits: torch.Tensor, work: Sequence[Work]) -> list[Sampled]:
    """Make of the logits of `forward` what a step brings."""
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
    """Return a token for each row that is no beam's, with its log-probabilities where they are asked for."""
    draws = [row.draw for row in rows if row.draw]
    drawn = iter(sample(_select(logits, [row.draw is not None for row in rows]), draws) if draws else [])
    tokens = [next(drawn) if row.draw else row.token_id for row in rows]
    asked = [(token, row.logprobs) for token, row in zip(tokens, rows, strict=True) if row.logprobs is not None]
    if not asked:
        return [Sampled(token) for token in tokens]
    scores = iter(score(_select(logits, [row.logprobs is not None for row in rows]), *zip(*asked, strict=True)))
    return [Sampled(token) if row.logprobs is None else next(scores) for token, row in zip(tokens, rows, strict=True)]


def _is_plain(work: Work) -> bool:
    """Return whether a work brings drawn tokens and nothing else."""
    return work.to_score is None and not work.candidates and (work.logprobs is None or not work.samples)


def _rows(work: Work) -> list[_Row]:
    part = work.to_score
    rows = [_Row(None, token, part.logprobs) for token in part.token_ids] if part else []
    if work.samples and work.candidates:
        rows.append(_Row(beam=work))
    elif work.samples:
        draws = [Draw(work.sampling, index, work.end, work.rules) for index in work.sample_indices]
        rows += [_Row(draw, 0, work.logprobs) for draw in draws]
    return rows


def _select(logits: torch.Tensor, chosen: list[bool]) -> torch.Tensor:
    """Return the rows that are chosen, without a copy where all are."""
    return logits if all(chosen) else logits[torch.tensor(chosen, device=logits.device)]
