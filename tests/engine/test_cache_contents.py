"""A cached block holds the K and V of the tokens of its key, in all circumstances."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.attention import PagedBatch, TorchBackend
from engine.attention.cache import CacheGeometry
from engine.schedule.request import FinishReason
from simulation.runner import MadeToFail
from tests.cache_contents import CommittedChains, check_cached_blocks
from tests.engine_in_process import ModelEngine

FAMILIES = ("llama", "gpt2", "opt")
BLOCK_SIZES = (1, 8, 16)

Prompt = Callable[[int], list[int]]
Tiny = Callable[[str], Path]


class RaisingBackend(TorchBackend):
    """Raises at the write number `raise_at`, after K and V of that layer were written."""

    raise_at = 0
    writes = 0

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
        super().write(layer, key, value, batch)
        self.writes += 1
        if self.writes == self.raise_at:
            raise MadeToFail(f"write {self.writes}")


class ObservedEngine(ModelEngine):
    """An engine that records the tokens of each key."""

    def __init__(self, folder: Path, *, block_size: int, device_blocks: int = 400, token_budget: int = 32) -> None:
        self.chains = CommittedChains(block_size)
        super().__init__(
            folder,
            block_size=block_size,
            device_blocks=device_blocks,
            token_budget=token_budget,
            observe=self.chains,
        )

    def make_backend(
        self, geometry: CacheGeometry, block_size: int, device_blocks: int, _host_blocks: int
    ) -> RaisingBackend:
        self.raising = RaisingBackend(geometry, block_size, device_blocks)
        # A slot that was never written must not equal a correct zero.
        self.raising.cache.fill_(1e4)
        return self.raising

    def check(self) -> int:
        return check_cached_blocks(self.folder, self.blocks.pool, self.backend, self.chains)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_cached_blocks_hold_the_tokens_of_their_keys(
    tiny_model: Tiny, random_prompt: Prompt, family: str, block_size: int
) -> None:
    engine = ObservedEngine(tiny_model(family), block_size=block_size)
    prompts = [random_prompt(length) for length in (1, 8, 17, 48, 70)]
    shared = [prompts[4][:48] + random_prompt(9), prompts[4]]
    engine.generate(prompts, 20)
    engine.generate(shared, 20)
    # All tokens but the last generated one are computed, whole blocks of them cached; the shared ones once.
    whole = {
        tuple(tokens[:end])
        for tokens in (group.members[0].tokens[:-1] for group in engine.finished.values())
        for end in range(block_size, len(tokens) + 1, block_size)
    }
    assert {engine.chains.tokens[key] for key in engine.chains.tokens} == whole
    assert engine.check() >= len(whole)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_cached_blocks_are_right_after_preemptions(tiny_model: Tiny, random_prompt: Prompt, block_size: int) -> None:
    engine = ObservedEngine(tiny_model("llama"), block_size=block_size, device_blocks=80 // block_size + 1)
    engine.generate([random_prompt(length) for length in range(1, 25, 2)], 40)
    assert engine.scheduler.totals.preemptions > 2
    assert engine.check() > 64 // block_size


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_cached_blocks_are_right_after_cancellations_at_random_turns(
    tiny_model: Tiny, random_prompt: Prompt, block_size: int, seed: int
) -> None:
    source = random.Random(seed)
    engine = ObservedEngine(tiny_model("llama"), block_size=block_size, device_blocks=160 // block_size)
    common = random_prompt(20)
    live = [engine.submit([*common[: source.randrange(21)], *random_prompt(30)], 30) for _ in range(8)]
    while not engine.scheduler.empty:
        if live and source.random() < 0.3:
            engine.scheduler.requests.cancel(live.pop(source.randrange(len(live))))
        engine.turn()
    engine.assert_released()
    assert FinishReason.CANCELLED in {sequence.finish for sequence in engine.finished.values()}
    assert engine.check() > 0


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("raise_at", [1, 2, 4, 8, 15, 40])  # writes of layers; the smallest model has one layer
def test_a_step_that_failed_leaves_nothing_in_the_cache(
    tiny_model: Tiny, random_prompt: Prompt, block_size: int, raise_at: int
) -> None:
    engine = ObservedEngine(tiny_model("llama"), block_size=block_size)
    engine.raising.raise_at = raise_at
    requests = [engine.submit(random_prompt(length), 50) for length in (40, 5)]
    while not engine.failures:
        assert not engine.scheduler.empty, "no step has failed"
        engine.turn()
    computed = engine.scheduler.totals.computed_tokens
    for request_id in requests:
        engine.scheduler.requests.cancel(request_id)
    engine.run()
    failed = [sequence for sequence in engine.finished.values() if sequence.finish is FinishReason.FAILED]
    assert failed
    assert all(f"write {raise_at}" in sequence.detail for sequence in failed)
    assert engine.check() <= computed // block_size
    # The same prompts are computed again, with correct contents.
    engine.generate([sequence.request.prompt for sequence in failed], 50)
    assert engine.check() >= sum((len(sequence.request.prompt) + 49) // block_size for sequence in failed)


def test_the_check_detects_a_single_wrong_number(tiny_model: Tiny, random_prompt: Prompt) -> None:
    engine = ObservedEngine(tiny_model("llama"), block_size=8)
    engine.generate([random_prompt(20)], 10)
    device = engine.blocks.pool.device
    block = next(block for block in device.eviction_order() if device.key(block) in engine.chains.tokens)
    keys = engine.backend.keys(-1)[block]
    keys[3, 1, 2] += 0.01 * keys.abs().max()
    with pytest.raises(AssertionError, match=f"^block {block} differs from its key's tokens"):
        engine.check()
