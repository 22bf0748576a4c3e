"""Rounds of random requests in a pool too small for them, so that they are swapped out and in."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.schedule.limits import Preemption
from engine.schedule.request import BeamSearch, LogitRules, Request, Sampling, Stopping
from tests.engine_in_process import GREEDY, ModelEngine

BLOCK = 4
SEQUENCES = 24
VOCABULARY = 384
TOLERANCE = 1e-4  # of scores and log-probabilities


class Round(NamedTuple):
    """Results of a round."""

    requests: int
    swaps: int
    swapped_tokens: int
    kinds: frozenset[str]  # of those that were swapped


def run_round(folder: Path, number: int) -> Round:
    """Run one round, and check that each answer equals that of a large pool.

    Pool and arrival times are drawn again if no preemption happened.
    """
    draw = random.Random(f"round {number}")
    requests = [_neighbour(draw), *(_request(draw, name) for name in range(draw.randint(8, 16)))]
    roomy = ModelEngine(folder, block_size=BLOCK, device_blocks=1000, max_sequences=100)
    for request in requests:
        roomy.take(request)
    roomy.run()
    assert roomy.scheduler.totals.preemptions == 0
    largest = max(map(roomy.scheduler.capacity.max_blocks, requests))
    tight = _in_a_small_pool(folder, requests, largest + draw.randint(0, 12), draw)
    while not tight.scheduler.totals.swapped_tokens:
        tight = _in_a_small_pool(folder, requests, largest + draw.randint(0, 12), draw)
    for request in requests:
        _check(tight, roomy, request.request_id)
    totals = tight.scheduler.totals
    swapped = [name for name, group in tight.finished.items() if group.stats.swapped_tokens]
    assert totals.recomputed_tokens == 0
    assert tight.blocks.pool.host.counts.held == 0
    return Round(len(requests), totals.preemptions, totals.swapped_tokens, frozenset(map(_kind, swapped)))


def _in_a_small_pool(folder: Path, requests: list[Request], blocks: int, draw: random.Random) -> ModelEngine:
    """Run requests with random arrivals in a pool that is little larger than the largest one."""
    engine = ModelEngine(
        folder,
        block_size=BLOCK,
        device_blocks=blocks,
        host_blocks=600,
        preemption=Preemption.SWAP,
        token_budget=draw.choice((SEQUENCES, 48, 512)),
        max_sequences=SEQUENCES,
    )
    for request in requests:
        engine.take(request)
        for _ in range(draw.choice((0, 1, 3, 6))):
            engine.turn()
    engine.run()
    return engine


def _check(tight: ModelEngine, roomy: ModelEngine, name: str) -> None:
    assert tight.samples[name] == roomy.samples[name]
    for found, expected in ((tight.sampled, roomy.sampled), (tight.scored, roomy.scored)):
        values = [one.logprob for one in expected[name]]
        assert [one.logprob for one in found[name]] == pytest.approx(values, abs=TOLERANCE)
    scores = [one.score for one in roomy.finished[name].samples]
    assert [one.score for one in tight.finished[name].samples] == pytest.approx(scores, abs=TOLERANCE)


def _neighbour(draw: random.Random) -> Request:
    """Make a request of the highest priority whose samples take a block each every few steps."""
    sampling, stopping = Sampling(seed=draw.getrandbits(32)), Stopping(draw.randint(24, 40))
    return Request("neighbour", (5, 6, 7), sampling, stopping, priority=-2, samples=((),) * draw.randint(4, 6))


def _request(draw: random.Random, name: int) -> Request:
    """Make a request of a random kind; a third of them share a prefix. A new kind of decoding needs a case."""
    shared = [random.Random(3).randrange(3, VOCABULARY) for _ in range(9)] if draw.random() < 0.3 else []
    prompt = (*shared, *(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 24))))
    kind = draw.choice(("greedy", "sampled", "samples", "beams", "rules", "logprobs"))
    sampling, rest = GREEDY, dict[str, Any]()
    if kind in ("sampled", "samples"):
        sampling = Sampling(
            draw.choice((0.7, 1.3)), draw.choice((0, 30)), draw.choice((1.0, 0.9)), seed=draw.getrandbits(32)
        )
    match kind:
        case "samples":
            rest = {"samples": ((),) * draw.randint(2, 5)}
        case "beams":
            width = draw.randint(2, 6)
            search = BeamSearch(width, draw.choice((0.0, 1.0, 1.5)), draw.random() < 0.5)
            rest = {"beam_search": search, "samples": ((),) * draw.randint(1, width)}
        case "rules":
            rules = LogitRules(draw.choice((1.0, 1.5)), draw.choice((0.0, 0.5)), draw.choice((0.0, 1.0)))
            rest = {"logit_rules": rules}
        case "logprobs":
            rest = {"logprobs": draw.choice((None, 0, 5)), "prompt_logprobs": draw.choice((None, 0, 5))}
    ends = frozenset(range(50, 50 + draw.choice((0, 0, 20))))
    stopping = Stopping(draw.randint(4, 30), ends, min_tokens=draw.choice((0, 0, 3)))
    priority = draw.choice((0, 0, 1, -1))
    return Request(f"{kind} {name}", prompt, sampling, stopping, priority=priority, arrival=float(name), **rest)


def _kind(request_id: str) -> str:
    return request_id.partition(" ")[0]
