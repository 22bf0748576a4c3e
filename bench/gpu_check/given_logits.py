"""A runner whose model is a table of logits: what remains of a step is its sampling."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from bench.gpu_check.cases import BLOCK_SIZE, DTYPE, check_tables
from blocks import blocks_for
from engine.attention.backend import PagedBatch
from engine.attention.cache import CacheGeometry
from engine.attention.upload import IntegerType
from engine.gpu.triton_backend import TritonBackend
from engine.model.loaded import LoadedModel
from engine.run.runner import ModelRunner
from engine.run.samplers import Sampler
from engine.schedule.request import NO_RULES, LogitRules, Sampling
from engine.schedule.step_plan import RowRules, StepPlan, Work

_GEOMETRY = CacheGeometry.uniform(1, 1, 16)
_BLOCKS = 1


class Way(NamedTuple):
    """A way of sampling."""

    sampling: Sampling
    rules: LogitRules = NO_RULES


WAYS = {
    "greedy": Way(Sampling(temperature=0.0)),
    "temperature": Way(Sampling(temperature=0.8)),
    "top_p": Way(Sampling(temperature=0.8, top_p=0.9)),
    "top_k": Way(Sampling(temperature=0.8, top_k=50)),
    "penalties": Way(Sampling(temperature=0.8), LogitRules(1.1, 0.2, 0.3)),
}


class _GivenLogits:
    """A decoder that returns the same logits for each step."""

    integers: IntegerType = np.int64

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def logits(self, *_: torch.Tensor | PagedBatch) -> torch.Tensor:
        return self._logits


class GivenLogits:
    """Samples from `[rows, vocabulary]` logits through the runner that serves requests."""

    def __init__(self, logits: torch.Tensor, sampler: Sampler) -> None:
        """Make the runner on the device of the logits."""
        vocabulary, device = logits.shape[1], logits.device
        loaded = LoadedModel(None, device, _GEOMETRY, BLOCK_SIZE, vocabulary, frozenset(), "given", logits.dtype)
        backend = TritonBackend(_GEOMETRY, BLOCK_SIZE, _BLOCKS, DTYPE, device)
        self._runner = ModelRunner(loaded, backend, BLOCK_SIZE, decoder=_GivenLogits(logits), sampler=sampler)
        self._steps = 0
        self._way: Way | None = None
        self._sampled = 0

    def sample(self, way: Way, known: Sequence[tuple[int, ...]]) -> list[int]:
        """Run a step, and return a token for each row. `known` has the tokens of each row's sequence, for penalties.

        The next step of the same way is one position later: the sampler has counted the tokens, as while it decodes.
        """
        self._steps += 1
        self._sampled = self._sampled + 1 if way == self._way else 0
        self._way = way
        work = tuple(self._work(row, way, tokens) for row, tokens in enumerate(known))
        check_tables(work, _BLOCKS)
        return [one.token_id for one in self._runner.launch(StepPlan(self._steps, (), work)).result()]

    def _work(self, row: int, way: Way, tokens: tuple[int, ...]) -> Work:
        half, position = len(tokens) // 2, len(tokens) + self._sampled
        given = () if self._sampled else (tokens[:half], tokens[half:])
        rules = RowRules(way.rules, *given) if way.rules.penalizes else None
        table = (1,) * blocks_for(position, BLOCK_SIZE)
        return Work(row, (0,), position - 1, table, True, way.sampling, rules=rules)


def logits_of(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return logits of which some tokens are likely, as those of a trained model."""
    return 4 * torch.randn(rows, vocabulary, dtype=DTYPE, device=device)


def known_tokens(rows: int, tokens: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Return random tokens for each row."""
    draw = random.Random(1)
    return [tuple(draw.randrange(vocabulary) for _ in range(tokens)) for _ in range(rows)]
