"""Replay of a record of requests: tokens generated from its keys, and a runner that computes nothing."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from engine.run.record import RecordedRequest
from engine.schedule.step_plan import Done, Sampled, StepPlan, Work

# Ends a request before its limit. Synthetic tokens start above it.
STOP_TOKEN = 0


class SyntheticTokens:
    """Generates tokens such that blocks with equal keys have equal tokens, and all others differ.

    All tokens of a block are the number of its key, in order of appearance. The tokens after the last full block, which
    have no key, get a unique number, so they are never shared.
    """

    def __init__(self, block_size: int) -> None:
        """`block_size` is the block size in the record, in tokens."""
        self._block_size = block_size
        self._numbers: dict[int, int] = {}
        self._next = count(STOP_TOKEN + 1)

    def of(self, request: RecordedRequest) -> "array[int]":
        """Return the tokens of prompt and output."""
        length = request.prompt_tokens + request.output_tokens
        tokens = array("i")
        for key in request.keys[: length // self._block_size]:
            if key not in self._numbers:
                self._numbers[key] = next(self._next)
            tokens.extend([self._numbers[key]] * self._block_size)
        tokens.extend([next(self._next)] * (length - len(tokens)))
        return tokens


class SampleTokens(NamedTuple):
    """The tokens of a sample, prompt and output, and whether it `stops` before its limit."""

    tokens: Sequence[int]
    stops: bool


class ReplayRunner:
    """Executes plans by looking up the next tokens; it computes nothing.

    The seed of its sampling parameters identifies a request.
    """

    def __init__(self) -> None:
        self._samples: dict[int, Sequence[SampleTokens]] = {}

    def add(self, seed: int, samples: Sequence[SampleTokens]) -> None:
        """Add a request."""
        self._samples[seed] = samples

    def remove(self, seed: int) -> None:
        """Remove an ended request."""
        del self._samples[seed]

    def launch(self, plan: StepPlan) -> Done:
        """Return the next token of each sample."""
        return Done([Sampled(token) for work in plan.work if work.samples for token in self._next(work)])

    def _next(self, work: Work) -> Iterator[int]:
        samples = self._samples[work.sampling.seed]
        for index in work.sample_indices:
            tokens, stops = samples[index]
            yield STOP_TOKEN if stops and work.end == len(tokens) - 1 else tokens[work.end]
