"""Thirty-two requests of every kind in one batch on the demo model, in float32: what transformers says, to 1e-4."""

from pathlib import Path

import pytest
import tokenizers

from engine.preemption import Preemption
from engine.request import Request
from tests.acceptance.conftest import ROOT, Record
from tests.mixed_batch import COUNT, GREEDIER, KINDS, SEQUENCES, MixedEngine, Tally, check, mixed_batch, run

MAX_TOKENS = 14
EOS = 2
ROOMY = 1500
# At first all requests run together; then the neighbour that grows takes the blocks of the last third of them.
SMALL = 320


@pytest.fixture(scope="module")
def requests(demo_model: Path) -> list[Request]:
    """Continue English texts of 8 to 40 tokens, each beginning elsewhere."""
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids = tokenizer.encode((ROOT / "docs" / "architecture.md").read_text()).ids
    prompts = [ids[61 * number : 61 * number + 8 + 13 * number % 33] for number in range(COUNT)]
    return mixed_batch(prompts, MAX_TOKENS, [EOS])


def test_all_at_once_in_a_roomy_pool(demo_model: Path, requests: list[Request], record: Record) -> None:
    engine = MixedEngine(demo_model, device_blocks=ROOMY)
    run(engine, requests)
    note(record, engine, tally := check(engine, requests))
    assert engine.most_running == COUNT
    assert not any(tally.preemptions.values())


def test_with_prompts_in_small_chunks(demo_model: Path, requests: list[Request], record: Record) -> None:
    engine = MixedEngine(demo_model, device_blocks=ROOMY, token_budget=SEQUENCES)
    run(engine, requests)
    note(record, engine, check(engine, requests))
    assert engine.chunks >= 8


@pytest.mark.parametrize("way", Preemption)
def test_in_a_pool_so_small_that_requests_of_every_kind_are_preempted(
    demo_model: Path, requests: list[Request], record: Record, way: Preemption
) -> None:
    engine = MixedEngine(demo_model, device_blocks=SMALL, host_blocks=SMALL, preemption=way)
    run(engine, [GREEDIER, *requests])
    note(record, engine, tally := check(engine, requests))
    totals = engine.scheduler.totals
    assert engine.most_running == 1 + COUNT
    assert {kind for kind, count in tally.preemptions.items() if count} == set(KINDS)
    assert (totals.recomputed_tokens > 0) == (way is not Preemption.SWAP)
    assert (totals.swapped_tokens > 0) == (way is not Preemption.RECOMPUTE)


def note(record: Record, engine: MixedEngine, tally: Tally) -> None:
    totals = engine.scheduler.totals
    record(
        requests=COUNT,
        most_at_once=engine.most_running,
        generated_tokens=tally.generated_tokens,
        near_ties=tally.near_ties,
        beam_near_ties=tally.beam_near_ties,
        preemptions=tally.preemptions,
        recomputed_tokens=totals.recomputed_tokens,
        swapped_tokens=totals.swapped_tokens,
        chunks_of_prompts=engine.chunks,
    )
