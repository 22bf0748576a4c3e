"""The first steps of an engine that has started: each gives the same tokens on two ways, near ties aside."""

import random
from collections.abc import Sequence
from itertools import count, takewhile
from typing import NamedTuple

from bench.gpu_check.cases import check_tables
from blocks import Copy, blocks_for
from engine.schedule.limits import Limits
from engine.schedule.request import MAX_LOGPROBS, Sampling
from engine.schedule.step_plan import Copies, Sampled, StepPlan, Work
from services.engine.startup.gpu_pool import largest_step
from services.engine.startup.parts import Parts
from tests.engine_in_process import EngineInProcess

_GREEDY = Sampling(temperature=0.0)
# Of the most likely tokens. Near ties differ where sums are rounded in another order.
_LEAST_EQUAL = 0.7


class _Prompt(NamedTuple):
    token_ids: tuple[int, ...]
    table: tuple[int, ...]


class FirstSteps:
    """Runs steps of an engine, with prompts in blocks of their own."""

    def __init__(self, parts: Parts, limits: Limits, lengths: Sequence[int]) -> None:
        """Choose prompts of these lengths, and blocks for them. `limits` are those of the engine's steps."""
        self._runner, self._capacity = parts.runner, parts.scheduler.capacity
        self._limits = limits
        self._blocks, self._numbers = count(1), count(1)
        draw = random.Random(1)
        self._prompts = [
            self._placed(tuple(draw.randrange(self._capacity.vocabulary_size) for _ in range(length)))
            for length in lengths
        ]
        self._decoded: list[Sampled] = []

    def prefill(self) -> None:
        """Compute all but the last token of each prompt, one after the other."""
        for prompt in self._prompts:
            self._run([_work(prompt, 0, len(prompt.token_ids) - 1)])

    def decode(self) -> None:
        """Compute the last tokens of all prompts together, as decoding sequences."""
        self._decoded = self._run(self._last_tokens())

    def mixed(self) -> None:
        """Compute each prompt as a whole, in other blocks, beside a decoding sequence."""
        for prompt, expected in zip(self._prompts, self._decoded, strict=True):
            again = self._placed(prompt.token_ids)
            decoding = self._last_tokens()[0]
            beside, found = self._run([decoding, _work(again, 0, len(again.token_ids))])
            check_alike(beside, self._decoded[0])
            check_alike(found, expected)

    def swap_out(self) -> None:
        """Copy the blocks of all prompts to the host."""
        copies = tuple(Copy(block, place) for place, block in enumerate(self._all_blocks(), 1))
        self._run([], Copies(device_to_host=copies))

    def swap_in(self) -> None:
        """Copy them back, into other blocks, and decode with these in the same step."""
        self._prompts = [self._placed(prompt.token_ids) for prompt in self._prompts]
        copies = tuple(Copy(place, block) for place, block in enumerate(self._all_blocks(), 1))
        for found, expected in zip(
            self._run(self._last_tokens(), Copies(host_to_device=copies)), self._decoded, strict=True
        ):
            check_alike(found, expected)

    def largest(self) -> None:
        """Run the largest step, which must fit beside recorded steps and a full pool. Overwrites the first blocks."""
        results = self._runner.launch(largest_step(self._capacity, self._limits)).result()
        check_fault(results)

    def _last_tokens(self) -> list[Work]:
        return [_work(prompt, len(prompt.token_ids) - 1, len(prompt.token_ids)) for prompt in self._prompts]

    def _all_blocks(self) -> list[int]:
        return [block for prompt in self._prompts for block in prompt.table]

    def _placed(self, token_ids: tuple[int, ...]) -> _Prompt:
        size = blocks_for(len(token_ids), self._capacity.block_size)
        return _Prompt(token_ids, tuple(next(self._blocks) for _ in range(size)))

    def _run(self, work: Sequence[Work], copies: Copies | None = None) -> list[Sampled]:
        numbered = tuple(one._replace(sequence=number) for number, one in enumerate(work))
        check_tables(numbered, self._capacity.device_blocks)
        plan = StepPlan(next(self._numbers), (copies,) if copies else (), numbered)
        return self._runner.launch(plan).result()


def replayed(parts: Parts, length: int, tokens: int) -> int:
    """Generate tokens, then resume behind the first half, as after a failover; return how many agree, in order.

    The resumed request finds nothing in the cache. Fails if tokens differ that are no near ties.
    """
    engine = EngineInProcess(parts.runner, parts.scheduler.capacity, scheduler=parts.scheduler)
    draw = random.Random(2)
    prompt = [draw.randrange(parts.loaded.vocabulary_size) for _ in range(length)]
    first = engine.submit(prompt, tokens, sampling=_GREEDY, logprobs=MAX_LOGPROBS)
    engine.run()
    known = tuple(engine.tokens[first][: tokens // 2])
    second = engine.submit(
        prompt, tokens, sampling=_GREEDY, logprobs=MAX_LOGPROBS, samples=(known,), salt=b"another engine"
    )
    engine.run()
    assert engine.cached[second] == 0, "the resumed request was to be computed anew"
    expected, found = engine.sampled[first][len(known) :], engine.sampled[second]
    assert len(found) == len(expected), f"{len(found)} tokens followed, not {len(expected)}"
    pairs = list(zip(found, expected, strict=True))
    equal = sum(1 for _ in takewhile(lambda pair: pair[0].token_id == pair[1].token_id, pairs))
    for pair in pairs[: equal + 1]:  # behind the first difference, both continue other texts
        check_alike(*pair)
    return equal


def check_alike(found: Sampled, expected: Sampled) -> None:
    """Fail unless most of the most likely tokens are the same."""
    check_fault([found, expected])
    likely = {token for token, _ in expected.top}
    share = len(likely & {token for token, _ in found.top}) / len(likely)
    assert share >= _LEAST_EQUAL, f"only {share:.2f} of the most likely tokens are the same"


def check_fault(results: Sequence[Sampled]) -> None:
    """Raise the first failure of sampling."""
    faults = [one.fault for one in results if one.fault is not None]
    assert not faults, f"sampling failed: {faults[0]}"


def _work(prompt: _Prompt, start: int, end: int) -> Work:
    return Work(0, prompt.token_ids[start:end], start, prompt.table, True, _GREEDY, logprobs=MAX_LOGPROBS)
