"""Rounds of random requests that are cut off and resumed, as by a gateway's failover."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.constraint import Constraint
from engine.schedule.limits import Preemption
from engine.schedule.request import FinishReason, LogitRules, Request, Sampling, Stopping
from tests.engine_in_process import ModelEngine

BLOCK = 4
SEQUENCES = 40
VOCABULARY = 384
END = 0
TOLERANCE = 1e-4  # of log-probabilities


class Round(NamedTuple):
    """Results of a round, summed over all resumptions."""

    ended: int  # samples that had ended before the cut
    begun: int  # samples that resumed with generated tokens
    preempted: int  # requests that were preempted after their resumption
    cached: int  # requests with generated tokens in the prefix cache


class _Cut(NamedTuple):
    """A resumed request, and the number of tokens of each sample at the cut."""

    request: Request
    lengths: list[int]


def run_round(folder: Path, constraints: Sequence[Constraint], number: int) -> Round:
    """Run one round, and check that resumed requests get the same tokens as undisturbed ones."""
    draw = random.Random(f"round {number}")
    requests = [_request(draw, name, constraints) for name in range(10)]
    whole = ModelEngine(
        folder, block_size=BLOCK, device_blocks=1000, max_sequences=SEQUENCES, ahead=draw.random() < 0.5
    )
    _run(whole, requests, draw)
    cuts = [_cut(draw, whole, request) for request in requests]
    begun = [cut.request for cut in cuts]
    fresh = ModelEngine(folder, block_size=BLOCK, device_blocks=1000, token_budget=draw.choice((SEQUENCES, 512)))
    _run(fresh, begun, draw)
    tight = _run_in_a_small_pool(folder, begun, draw)
    for engine in (fresh, tight):
        for cut in cuts:
            _check(engine, cut.request.request_id, whole, cut)
    warm = [cut._replace(request=replace(cut.request, request_id=f"{cut.request.request_id} again")) for cut in cuts]
    _run(whole, [cut.request for cut in warm], draw)
    for cut in warm:
        _check(whole, cut.request.request_id, whole, cut)
    return Round(
        ended=sum(len(request.ended) for request in begun),
        begun=sum(bool(sample) for request in begun for sample in request.samples) - sum(len(r.ended) for r in begun),
        preempted=sum(tight.finished[request.request_id].stats.preemptions > 0 for request in begun),
        cached=sum(whole.cached[cut.request.request_id] > len(cut.request.prompt) for cut in warm),
    )


def _request(draw: random.Random, name: int, constraints: Sequence[Constraint]) -> Request:
    """Make a request with a random combination of options. A new option is a line here."""
    prompt = tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 24)))
    temperature = draw.choice((0.0, 0.7, 1.0, 1.5))
    sampling = Sampling(
        temperature, draw.choice((0, 30)), draw.choice((1.0, 0.9)), draw.choice((0.0, 0.05)), draw.getrandbits(63)
    )
    constraint = draw.choice(constraints) if draw.random() < 0.4 else None
    ends = frozenset({END, *range(50, 50 + draw.choice((0, 0, 20)))})
    ignored = frozenset({END}) if constraint is None and draw.random() < 0.2 else frozenset[int]()
    stopping = Stopping(
        draw.randint(6, 30), ends - ignored, draw.choice((0, 0, 6)) if constraint is None else 0, ignored
    )
    rest = dict[str, Any]()
    if draw.random() < 0.5:
        rest["logit_rules"] = LogitRules(
            draw.choice((1.0, 1.3)),
            draw.choice((0.0, 0.5)),
            draw.choice((0.0, 1.0)),
            draw.choice(((), ((77, 3.0), (END, 6.0)))),
            () if constraint or draw.random() < 0.5 else tuple(range(20, 320)),
        )
    rest["logprobs"], rest["prompt_logprobs"] = draw.choice((None, 0, 5)), draw.choice((None, None, 2))
    samples = ((),) * draw.choice((1, 1, 2, 3, 4))
    salt = draw.choice((b"", b"tenant"))
    return Request(f"r{name}", prompt, sampling, stopping, salt, samples=samples, constraint=constraint, **rest)


def _cut(draw: random.Random, whole: ModelEngine, request: Request) -> _Cut:
    """Cut each sample anywhere, because a gateway may have received more of one sample than of another.

    A sample cut after its last token has ended; at least one has not.
    """
    samples = whole.samples[request.request_id]
    lengths = [draw.choice((0, len(tokens), draw.randint(0, len(tokens)))) for tokens in samples]
    if all(length == len(tokens) for length, tokens in zip(lengths, samples, strict=True)):
        index = draw.randrange(len(samples))
        lengths[index] = draw.randrange(len(samples[index]))
    ended = frozenset(index for index, length in enumerate(lengths) if length == len(samples[index]))
    generated = tuple(tuple(tokens[:length]) for tokens, length in zip(samples, lengths, strict=True))
    return _Cut(replace(request, samples=generated, ended=ended), lengths)


def _run(engine: ModelEngine, requests: Sequence[Request], draw: random.Random) -> None:
    """Submit requests at random times, and run until all have ended."""
    for request in requests:
        engine.take(request)
        for _ in range(draw.choice((0, 1, 3))):
            engine.turn()
    engine.run()


def _run_in_a_small_pool(folder: Path, requests: Sequence[Request], draw: random.Random) -> ModelEngine:
    """Run requests in a pool little larger than the largest one, beside a growing request of higher priority."""
    neighbour = Request("neighbour", (5, 6, 7), Sampling(seed=1), Stopping(30), priority=-2, samples=((),) * 6)
    full = ModelEngine(folder, block_size=BLOCK, max_sequences=SEQUENCES).scheduler.capacity
    largest = max(full.max_blocks(request) for request in (neighbour, *requests))
    engine = ModelEngine(
        folder,
        block_size=BLOCK,
        device_blocks=largest + draw.randint(0, 4),
        token_budget=draw.choice((SEQUENCES, 512)),
        max_sequences=SEQUENCES,
        host_blocks=300,
        preemption=draw.choice((Preemption.RECOMPUTE, Preemption.SWAP)),
    )
    _run(engine, [requests[0], neighbour, *requests[1:]], draw)
    return engine


def _check(engine: ModelEngine, name: str, whole: ModelEngine, cut: _Cut) -> None:
    """Compare the output before and after the cut with that of the whole request."""
    expected = whole.finished[cut.request.request_id.removesuffix(" again")]
    undisturbed = expected.request.request_id
    members = engine.finished[name].members
    for index, length in enumerate(cut.lengths):
        drawn, rest = whole.drawn[undisturbed][index], engine.drawn[name][index]
        assert [token.token_id for token in rest] == [token.token_id for token in drawn[length:]], (name, index)
        _check_scores(rest, drawn[length:])
        end, undisturbed_end = members[index], expected.members[index]
        if index in cut.request.ended:
            assert (rest, end.finish, end.table) == ([], FinishReason.STOP, ())
        else:
            assert (end.finish, end.stop_token) == (undisturbed_end.finish, undisturbed_end.stop_token)
    assert [token.token_id for token in engine.scored[name]] == [token.token_id for token in whole.scored[undisturbed]]
    _check_scores(engine.scored[name], whole.scored[undisturbed])


def _check_scores(scores: list[Any], expected: list[Any]) -> None:
    for one, other in zip(scores, expected, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert dict(one.top) == pytest.approx(dict(other.top), abs=TOLERANCE)
