"""Faults of other systems that spoil contents of blocks by group of layers, tried here: each with its number."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.schedule.limits import Preemption
from tests.engine_in_process import EightBitEngine, ModelEngine
from tests.model_types.cases import case_named
from tests.model_types.checkpoints import write_checkpoint

BLOCK_SIZE = 4
BLOCKS = 40
CONCURRENT = 12

Prompt = Callable[[int], list[int]]


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_vllm_50702_a_full_pool_with_hits_and_8_bits_gives_the_tokens_of_a_large_one(
    tmp_path: Path, random_prompt: Prompt, preemption: Preemption
) -> None:
    write_checkpoint(case_named("gemma4_text: keys as values"), tmp_path / "model")
    common = [token % 280 for token in random_prompt(23)]
    draw = random.Random(50702)
    prompts = [[*common[: draw.randrange(24)], *range(20 + number, 23 + number)] for number in range(4 * CONCURRENT)]

    def run(device_blocks: int, host_blocks: int) -> ModelEngine:
        engine = EightBitEngine(
            tmp_path / "model",
            block_size=BLOCK_SIZE,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            token_budget=16,
            preemption=preemption,
            kinds=True,
        )
        for number, prompt in enumerate(prompts):
            engine.submit(prompt, 40, request_id=str(number))
            engine.turn_until(lambda: len(engine.finished) > number - CONCURRENT)  # noqa: B023
        engine.run()
        return engine

    large, full = run(2000, 0), run(BLOCKS, 200 if preemption is Preemption.SWAP else 0)
    assert full.tokens == large.tokens
    assert full.scheduler.totals.cached_tokens > 100
    assert full.scheduler.totals.preemptions > 5
    assert large.scheduler.totals.preemptions == 0
