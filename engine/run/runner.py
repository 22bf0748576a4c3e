"""Executes plans on one device: copies, forward, sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.upload import Download, upload
from engine.gpu.copy_stream import CopyStream
from engine.gpu.current_device import on_device
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loaded import LoadedModel
from engine.run.continuations import continuations
from engine.run.forward import ForwardPass
from engine.run.logprobs import Scores, score
from engine.run.sample_timer import Mark, SampleTimer, seconds_between
from engine.run.samplers import Sampler, StepSampler, TorchSampler
from engine.run.sampling import Draw, likeliest
from engine.run.steady_decoding import Columns
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Done, Launched, Sampled, StepPlan, Work

_TORCH = TorchSampler()


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
        share: Callable[[torch.Tensor], object] = lambda _: None,
        sampler: Sampler | None = None,
    ) -> None:
        """Combine the parts. `copy_stream` defaults to the one for the model's device.

        A `decoder` replaces the model's modules; it uses the cache of the same backend. On a CPU, `clock` (seconds)
        measures the sampling. `share` receives the tokens of each step of plain work: `[samples]` int64, on the device.
        `sampler` defaults to torch's operators.
        """
        decoder = decoder or ModulesDecoder(loaded, backend)
        self._device: torch.device = loaded.device
        self._pass = ForwardPass(decoder, backend, block_size, self._device, copy_stream)
        self._timer = SampleTimer(self._device, clock)
        self._share = share
        self._sampler = sampler or _TORCH
        self._is_cpu = self._device.type == "cpu"
        self._sampling: tuple[Sampling, ...] = ()  # of the latest step without rules and scores,
        self._is_greedy = True  # and whether all of it is greedy

    def launch(self, plan: StepPlan) -> Launched:
        """Start block copies and the forward pass, behind the steps launched before. Raises CopyFailed.

        On a GPU all work is queued on the current stream; a step with beams has ended when this returns.
        """
        if self._is_cpu and torch.is_inference_mode_enabled():  # on the engine's thread it always is
            return self._launch(plan)
        with torch.inference_mode(), on_device(self._device):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> Launched:
        logits = self._pass.run(plan)
        if logits is None:
            return Done([])
        if (columns := self._pass.columns) is not None and self._takes_likeliest(columns):
            return self._of_likeliest(logits, plan)
        started, sampler = self._timer.mark(), StepSampler(self._sampler)
        rows = None if all(map(is_plain, plan.work)) else [row for item in plan.work for row in _rows(item)]
        if rows and any(row.beam for row in rows):
            return self._on_host(plan.work, _results_of(logits, plan.work, sampler), started)
        try:
            draws = [draw for item in plan.work for draw in _draws(item)]
            sampled = logits if rows is None else _select(logits, _are_drawn(rows))
            tokens = sampler.sample(sampled, draws) if draws else _no_tokens(self._device)
            scores = None if rows is None else _scores_of(logits, rows, tokens)
        except Exception as failure:
            results = sample_separately(logits, plan.work, partial(outcomes, sampler=sampler), failure)
            return self._on_host(plan.work, results, started)
        self._keep(plan.work, tokens)
        downloaded = Download(tokens)
        if rows is None or scores is None:
            return _DeviceTokens(started, self._timer.mark(), downloaded)
        return _ScoredTokens(started, self._timer.mark(), downloaded, rows, scores)

    def _takes_likeliest(self, columns: Columns) -> bool:
        """Return whether each row's result is its likeliest token and nothing else."""
        if not columns.has_bare_tokens:
            return False
        if columns.sampling != self._sampling:
            self._sampling, self._is_greedy = columns.sampling, all(one.greedy for one in columns.sampling)
        return self._is_greedy

    def _of_likeliest(self, logits: torch.Tensor, plan: StepPlan) -> Launched:
        """Return a step that takes the likeliest tokens of logits on a CPU."""
        started = self._timer.mark()
        tokens = likeliest(logits)
        self._keep(plan.work, tokens)
        return _DeviceTokens(started, self._timer.mark(), Download(tokens))

    @torch.inference_mode()
    def forward(self, work: tuple[Work, ...]) -> torch.Tensor:
        """Return `[rows, vocabulary]` logits of each work: rows that score its prompt, of samples, of proposals."""
        with on_device(self._device):
            return self._pass.logits(work)

    def _on_host(self, work: Sequence[Work], results: list[Sampled], started: Mark) -> Launched:
        """Return a step with results, and keep its tokens for sequences whose next step is planned already."""
        outcome = iter(results)
        tokens: list[int] = []
        for item in work:
            found = [next(outcome) for _ in range(item.outcomes)]
            tokens += [one.token_id for one in found[len(found) - len(item.sample_indices) :]] if item.samples else []
        self._keep(work, upload(tokens, torch.int64, self._device))
        return _HostTokens(started, self._timer.mark(), results)

    def _keep(self, work: Sequence[Work], tokens: torch.Tensor) -> None:
        self._pass.keep(work, tokens)
        self._share(tokens)


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
class _ScoredTokens(_Sampling):
    """A step whose tokens and scores are being copied to the host."""

    tokens: Download
    rows: Sequence["_Row"]
    scores: Scores

    def result(self) -> list[Sampled]:
        drawn = iter(self.tokens.wait())
        found = [Sampled(next(drawn) if row.draw else row.token_id) for row in self.rows]
        asked = [(place, row.logprobs) for place, row in enumerate(self.rows) if row.logprobs is not None]
        scored = self.scores.wait([found[place].token_id for place, _ in asked], [count for _, count in asked])
        for (place, _), one in zip(asked, scored, strict=True):
            found[place] = one
        return found


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


def _results_of(logits: torch.Tensor, work: Sequence[Work], sampler: Sampler = _TORCH) -> list[Sampled]:
    """Return the results of the logits. An exception raised for one request does not affect the others."""
    try:
        return outcomes(logits, work, sampler)
    except Exception as failure:
        return sample_separately(logits, work, partial(outcomes, sampler=sampler), failure)


def sample_separately(
    logits: torch.Tensor, work: Sequence[Work], sampler: Callable[..., list[Sampled]], failure: Exception
) -> list[Sampled]:
    """Return the results of a step whose batched sampling raised `failure`: each request is sampled separately.

    Rows are independent, so the other requests get the same tokens. The Sampled of a failed request has the fault.
    Raises `failure` if even an argmax fails, because then the device failed.
    """
    try:
        logits.argmax(dim=-1).tolist()
    except Exception:
        raise failure from None
    results: list[Sampled] = []
    first = 0
    for item in work:
        rows = logits[first : first + item.outcomes]
        first += item.outcomes
        try:
            results += sampler(rows, [item])
        except Exception as fault:
            results += [Sampled(0, fault=fault)] * item.outcomes
    return results


def outcomes(logits: torch.Tensor, work: Sequence[Work], sampler: Sampler = _TORCH) -> list[Sampled]:
    """Return the results of a step from the logits of `forward`."""
    rows = [row for item in work for row in _rows(item)]
    beams = [row.beam for row in rows if row.beam is not None]
    if not beams:
        return _tokens(logits, rows, sampler)
    found = continuations(
        _select(logits, [row.beam is not None for row in rows]),
        [beam.rules for beam in beams],
        [beam.candidates for beam in beams],
    )
    others = [row for row in rows if row.beam is None]
    tokens = iter(_tokens(_select(logits, [row.beam is None for row in rows]), others, sampler) if others else [])
    beam_tokens = iter(found)
    return [next(tokens) if row.beam is None else next(beam_tokens) for row in rows]


def _tokens(logits: torch.Tensor, rows: Sequence[_Row], sampler: Sampler) -> list[Sampled]:
    """Return a token for each row that is not a beam's, with log-probabilities if requested."""
    draws = [row.draw for row in rows if row.draw]
    drawn = iter(_drawn(logits, rows, draws, sampler) if draws else [])
    tokens = [next(drawn) if row.draw else row.token_id for row in rows]
    asked = [(token, row.logprobs) for token, row in zip(tokens, rows, strict=True) if row.logprobs is not None]
    if not asked:
        return [Sampled(token) for token in tokens]
    scores = iter(score(_select(logits, [row.logprobs is not None for row in rows]), *zip(*asked, strict=True)))
    return [Sampled(token) if row.logprobs is None else next(scores) for token, row in zip(tokens, rows, strict=True)]


def _drawn(logits: torch.Tensor, rows: Sequence[_Row], draws: Sequence[Draw], sampler: Sampler) -> list[int]:
    tokens: list[int] = sampler.sample(_select(logits, _are_drawn(rows)), draws).tolist()
    return tokens


def _are_drawn(rows: Sequence[_Row]) -> list[bool]:
    return [row.draw is not None for row in rows]


def _no_tokens(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)


def _scores_of(logits: torch.Tensor, rows: Sequence[_Row], drawn: torch.Tensor) -> Scores:
    """Score the known and the drawn tokens of rows that want it; `drawn` `[draws]` int64 stay on the device."""
    device = logits.device
    tokens = upload([row.token_id for row in rows], torch.int64, device)
    tokens[upload([place for place, row in enumerate(rows) if row.draw], torch.int64, device)] = drawn
    wanted = upload([place for place, row in enumerate(rows) if row.logprobs is not None], torch.int64, device)
    return Scores(logits.index_select(0, wanted), tokens.index_select(0, wanted))


def is_plain(work: Work) -> bool:
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


def _draws(work: Work) -> Sequence[Draw]:
    if not work.samples:
        return ()
    end = work.least_end
    if len(work.sample_indices) == 1 and not work.proposed:  # nearly all work
        return (Draw(work.sampling, work.sample_indices[0], end, work.rules, work.sequence),)
    draws = [Draw(work.sampling, index, end, work.rules, work.sequence) for index in work.sample_indices]
    if work.proposed:
        rules = work.later_rules or (None,) * work.proposed
        draws += [Draw(work.sampling, work.sample_indices[0], end + place, one) for place, one in enumerate(rules, 1)]
    return draws


def _select(logits: torch.Tensor, chosen: list[bool]) -> torch.Tensor:
    """Return the chosen rows, without a copy if all are chosen."""
    if all(chosen):
        return logits
    # By number: a mask as index waits for the device, which counts its rows.
    numbers = [row for row, one in enumerate(chosen) if one]
    return logits.index_select(0, upload(numbers, torch.int64, logits.device))
