"""A plan arrives at the other ranks as it was sent, and nothing else is taken for one."""

import random
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocks import Copy
from engine.errors import RankFailed
from engine.parallel.plan_message import PlanDecoder, PlanEncoder
from engine.schedule.request import Sampling
from engine.schedule.step_plan import PENDING, Copies, PromptPart, StepPlan, Work

_numbers = st.integers(0, 3)
_copies = st.lists(st.builds(Copy, _numbers, _numbers), max_size=2).map(tuple)
_results = st.lists(st.builds(Copies, _copies, _copies, _copies, st.just(())), max_size=2).map(tuple)


@st.composite
def works(draw: st.DrawFn, sequence: int) -> Work:
    tokens = tuple(draw(st.lists(_numbers, min_size=1, max_size=3) | st.just([PENDING])))
    start = draw(_numbers)
    return Work(
        sequence=sequence,
        token_ids=tokens,
        start=start,
        block_table=tuple(draw(st.lists(_numbers, max_size=4))),
        samples=draw(st.booleans()),
        sampling=Sampling(),
        sample_indices=tuple(range(draw(st.integers(1, 3)))),
        to_score=draw(st.none() | st.builds(PromptPart, st.just(start + 1), st.just(tokens), st.just(2))),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    sequences = draw(st.lists(st.integers(0, 4), unique=True))
    return StepPlan(draw(st.integers(0, 1 << 40)), draw(_results), tuple(draw(works(one)) for one in sequences))


@given(st.lists(st.tuples(plans(), st.booleans()), max_size=6))
def test_every_plan_is_decoded_as_what_a_rank_computes(sent: list[tuple[StepPlan, bool]]) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    numbers: dict[int, int] = {}
    for plan, shares in sent:
        received = decoder.decode(encoder.encode(plan, shares_tokens=shares))
        assert received.shares_tokens == shares
        assert (received.plan.step, received.plan.copies) == (plan.step, plan.copies)
        assert [_computed(one) for one in received.plan.work] == [_computed(one) for one in plan.work]
        found = {one.sequence: other.sequence for one, other in zip(plan.work, received.plan.work, strict=True)}
        assert len(set(found.values())) == len(found)
        assert all(numbers[one] == number for one, number in found.items() if one in numbers)
        numbers = found  # a sequence that is in consecutive plans keeps its number


def _computed(work: Work) -> tuple[object, ...]:
    scored = (work.to_score.position, len(work.to_score.token_ids)) if work.to_score else None
    samples = len(work.sample_indices) if work.samples else 0
    return (work.token_ids, work.start, work.block_table, samples, scored)


def decoding(sequences: int, length: int) -> StepPlan:
    table = tuple(range(1, 2 + length // 16))
    return StepPlan(1, (), tuple(Work(one, (5,), length, table, True, Sampling()) for one in range(sequences)))


@pytest.mark.parametrize("length", [100, 8000])
def test_a_step_of_256_sequences_has_seven_kib_whatever_their_length(length: int) -> None:
    encoder = PlanEncoder()
    encoder.encode(decoding(256, length), shares_tokens=True)
    assert len(encoder.encode(decoding(256, length + 1), shares_tokens=True)) <= 7 * 1024 + 64


def test_a_plan_that_is_not_the_next_one_is_refused() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    encoder.encode(decoding(1, 1), shares_tokens=False)
    second = encoder.encode(decoding(1, 2), shares_tokens=False)
    with pytest.raises(RankFailed, match="plan 1 arrived where plan 0 was expected"):
        decoder.decode(second)


@given(st.integers(0, 1 << 30))
def test_a_damaged_plan_is_refused_or_is_another_plan(seed: int) -> None:
    draw, encoder, decoder = random.Random(seed), PlanEncoder(), PlanDecoder()
    message = bytearray(encoder.encode(decoding(3, 40), shares_tokens=False))
    cut = bytes(message[: draw.randrange(len(message))])
    with pytest.raises(RankFailed, match="damaged"):
        decoder.decode(cut)
    place = draw.randrange(len(message) // 4)
    struct.pack_into("<i", message, 4 * place, draw.choice([-1, 7, 1 << 30, -(1 << 31)]))
    with suppress(RankFailed):
        decoder.decode(bytes(message))
