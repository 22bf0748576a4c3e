"""Thirty-two requests of all kinds in one batch on the demo model, in float32, equal transformers' to 1e-4."""

from pathlib import Path

import pytest
import tokenizers

from engine.schedule.limits import Preemption
from engine.schedule.request import Request
from tests.acceptance.conftest import Record
from tests.engine.mixed_batch import COUNT, GREEDIER, KINDS, SEQUENCES, MixedEngine, Tally, check, mixed_batch, run

MAX_TOKENS = 18
EOS = 2
LARGE = 1500
# All requests start together; later the growing neighbour preempts the last third of them.
SMALL = 330


TEXT = """In the autumn the old harbour fills with boats again. The fishermen bring their nets ashore, mend them in the
long sheds behind the customs house, and talk about the summer as if it had been a war. Nobody remembers who built the
lighthouse; some say it was a bishop who feared the sea, others a merchant who had lost three ships in one night. Its
lamp was lit with oil until the railway came, and the keeper climbed the two hundred steps every evening, in every
weather, for forty years. When he died, the town council found a drawer full of letters addressed to nobody. They
described the colour of the water on each day of his life, the birds that had flown against the glass, and the names of
all vessels that passed, with the hour and the direction of the wind. A schoolteacher copied them by hand, numbered the
pages, and read one aloud each morning before arithmetic. That is how the children of the place learnt to tell a brig
from a schooner, and why the clock in the market square still shows the time of the tide beside that of the sun."""


@pytest.fixture(scope="module")
def requests(demo_model: Path) -> list[Request]:
    """Requests with prompts of 8 to 40 tokens from different parts of the text."""
    ids = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(TEXT).ids
    prompts = [ids[5 * number : 5 * number + 8 + 13 * number % 33] for number in range(COUNT)]
    assert all(len(prompt) >= 8 for prompt in prompts)
    return mixed_batch(prompts, MAX_TOKENS, [EOS])


def test_all_requests_at_once_in_a_large_pool(demo_model: Path, requests: list[Request], record: Record) -> None:
    engine = MixedEngine(demo_model, device_blocks=LARGE)
    run(engine, requests)
    note(record, engine, tally := check(engine, requests))
    assert engine.most_running == COUNT
    assert not any(tally.preemptions.values())


def test_with_chunked_prefill_in_small_chunks(demo_model: Path, requests: list[Request], record: Record) -> None:
    engine = MixedEngine(demo_model, device_blocks=LARGE, token_budget=SEQUENCES)
    run(engine, requests)
    note(record, engine, check(engine, requests))
    assert engine.chunks >= 8


@pytest.mark.parametrize("way", Preemption)
def test_in_a_small_pool_where_requests_of_every_kind_are_preempted(
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
