"""Cached blocks of the demo model hold the K and V of their keys' tokens."""

import random
from pathlib import Path

import pytest
import tokenizers

from tests.acceptance.conftest import ROOT, Record
from tests.engine.test_cache_contents import ObservedEngine


@pytest.mark.parametrize("block_size", [1, 16])
def test_cached_blocks_hold_the_right_contents_after_preemptions_cancellations_and_a_failed_step(
    demo_model: Path, record: Record, block_size: int
) -> None:
    source = random.Random(block_size)
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids = tokenizer.encode((ROOT / "docs" / "architecture.md").read_text()).ids
    engine = ObservedEngine(demo_model, block_size=block_size, device_blocks=400 // block_size, token_budget=64)
    engine.raising.raise_at = 700  # a write in the 24th step, after K and V of ten of its layers
    live = [engine.submit([*ids[:48], *ids[100 * n : 100 * n + 20 + n]], 24) for n in range(1, 13)]
    while not engine.scheduler.empty:
        if live and source.random() < 0.05:
            engine.scheduler.requests.cancel(live.pop(source.randrange(len(live))))
        engine.turn()
    engine.assert_released()
    checked = engine.check()
    totals = engine.scheduler.totals
    record(checked_blocks=checked, preemptions=totals.preemptions, failed_steps=len(engine.failures))
    assert len(engine.failures) == 1
    assert checked > 100 // block_size
