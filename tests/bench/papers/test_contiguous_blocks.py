"""The baselines: what they reserve in the paper's Figure 3, and how the product's engine runs on them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.loads.memory import Lengths, NoRunner
from bench.papers.baselines.contiguous_blocks import ContiguousBlocks, Demand
from bench.papers.baselines.slabs import Reservation, reservations
from blocks import Allocate, Extend, Fork, Free, FreeReason, Step, StepResult
from engine.run.loop import Engine
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.outputs import Finished, Tokens
from engine.schedule.request import BeamSearch, Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Done, Sampled, StepPlan

# Figure 3: request A has 7 prompt tokens and ends after 3 more, request B ends after 3 and 2.
A, B = Lengths(7, 3), Lengths(3, 2)
SLOTS = 4096


def figure_3(reservation: Reservation, *, static_batches: bool = False) -> ContiguousBlocks:
    demands = {"A": Demand(A), "B": Demand(B)}
    return ContiguousBlocks(SLOTS, 1, reservation, demands, static_batches=static_batches)


def allocate(number: int, name: str) -> Allocate:
    return Allocate(number, number, name, b"", [0], 1)


def answer(blocks: ContiguousBlocks, step: Step) -> StepResult:
    blocks.send(step)
    result = blocks.receive()
    assert result is not None
    return result


def slots(blocks: ContiguousBlocks, computed: dict[int, int]) -> list[int]:
    """Slots with tokens, reserved, internal, external."""
    return [round(share * SLOTS) for share in blocks.shares(computed)]


def test_max_never_uses_2038_slots_of_request_a_and_507_of_request_b() -> None:
    """The models' contexts are 2,048 tokens for A and 512 for B."""
    blocks = figure_3(lambda lengths: 2048 if lengths == A else 512)
    result = answer(blocks, Step(1, allocates=[allocate(1, "A"), allocate(2, "B")]))
    assert [change.room_tokens for change in result.tables] == [2048, 512]
    # A holds its prompt and one generated token and will use two more; B holds four and will use one.
    assert slots(blocks, {1: 8, 2: 4}) == [12, 3, 2038 + 507, SLOTS - 2048 - 512]


@pytest.mark.parametrize(
    ("policy", "rooms", "internal"), [("oracle", [10, 5], 0), ("pow2", [11, 5], 1), ("max", [2048, 2048], 2038 + 2043)]
)
def test_each_orca_reserves_its_part_of_figure_3(policy: str, rooms: list[int], internal: int) -> None:
    blocks = figure_3(reservations(2048)[policy])
    result = answer(blocks, Step(1, allocates=[allocate(1, "A"), allocate(2, "B")]))
    assert [change.room_tokens for change in result.tables] == rooms
    assert slots(blocks, {})[:3] == [0, sum(A) + sum(B), internal]


def test_pow2_reserves_32_positions_for_an_output_of_25() -> None:
    """The example of section 6.1."""
    assert reservations(2048)["pow2"](Lengths(100, 25)) == 132


@pytest.mark.parametrize("policy", ["oracle", "pow2", "max"])
def test_no_orca_reserves_more_than_the_context(policy: str) -> None:
    assert reservations(2048)[policy](Lengths(1000, 1048)) == 2048


def test_faster_transformer_admits_a_batch_only_when_the_old_one_is_empty() -> None:
    blocks = figure_3(reservations(16)["max"], static_batches=True)
    assert not answer(blocks, Step(1, allocates=[allocate(1, "A")])).refusals
    assert answer(blocks, Step(2, allocates=[allocate(2, "B")])).refusals
    ended = Step(3, frees=[Free(1, FreeReason.FINISHED)], allocates=[allocate(2, "B")])
    assert not answer(blocks, ended).refusals
    assert blocks.batches == [["A"], ["B"]]


def test_a_request_without_room_holds_back_those_behind_it() -> None:
    demands = {"large": Demand(Lengths(6, 2)), "small": Demand(Lengths(1, 1))}
    blocks = ContiguousBlocks(9, 1, reservations(16)["oracle"], demands)
    taken = ContiguousBlocks(7, 1, reservations(16)["oracle"], demands)
    items = [allocate(1, "large"), allocate(2, "small")]
    assert [len(answer(one, Step(1, allocates=items)).refusals) for one in (blocks, taken)] == [1, 2]


def test_a_group_gets_all_slabs_or_none() -> None:
    demands = {"A": Demand(Lengths(4, 4), 3), "B": Demand(Lengths(4, 4))}
    blocks = ContiguousBlocks(16, 1, reservations(16)["oracle"], demands)
    refused = answer(blocks, Step(1, allocates=[allocate(1, "A")]))
    assert refused.refusals
    assert refused.available_blocks == 16
    assert not answer(blocks, Step(2, allocates=[allocate(2, "B")])).refusals


def test_a_forked_sequence_gets_a_slab_of_its_own_and_a_copy() -> None:
    blocks = ContiguousBlocks(16, 1, reservations(16)["oracle"], {"A": Demand(Lengths(3, 5), 2)})
    trunk = answer(blocks, Step(1, allocates=[allocate(1, "A")])).tables[0]
    assert list(trunk.block_ids) == list(range(9, 17))
    step = Step(2, forks=[Fork(1, 2, 3)], extends=[Extend(1, [(1, 4), (2, 4)])])
    result = answer(blocks, step)
    assert [(change.sequence, change.first_index, list(change.block_ids)) for change in result.tables[2:]] == [
        (1, 3, list(range(12, 17))),
        (2, 0, list(range(1, 9))),
    ]
    assert [tuple(copy) for copy in result.copies] == [(9, 1), (10, 2), (11, 3)]


class BeamRunner:
    """Gives every beam the same two likely tokens, so that beams are forked and pruned."""

    def launch(self, plan: StepPlan) -> Done:
        found = [Sampled(0, top=tuple((rank, -1.0 - rank) for rank in range(work.candidates))) for work in plan.work]
        return Done([one for one, work in zip(found, plan.work, strict=True) if work.samples])


def run(blocks: ContiguousBlocks, capacity: Capacity, requests: list[Request]) -> Scheduler:
    """Serve requests to their end, and check what each generated."""
    scheduler = Scheduler(capacity, Limits(token_budget=16, max_sequences=16))
    beams = any(request.beam_search for request in requests)
    engine = Engine(scheduler, BeamRunner() if beams else NoRunner(), blocks, lambda: 0.0)
    for request in requests:
        scheduler.requests.submit(request)
    generated: dict[str, int] = {}
    finished = 0
    for _ in range(4000):
        if scheduler.empty:
            break
        outputs = engine.turn().outputs
        assert engine.last_failure is None
        finished += sum(isinstance(one, Finished) for one in outputs)
        for one in outputs:
            if isinstance(one, Tokens):
                generated[one.request_id] = generated.get(one.request_id, 0) + len(one.tokens)
    assert finished == len(requests)
    expected = {one.request_id: one.stopping.max_tokens * len(one.samples) for one in requests}
    assert generated == expected
    return scheduler


def request_of(number: int, lengths: Lengths, width: int, *, beams: bool) -> Request:
    return Request(
        request_id=f"r{number}",
        prompt=(number + 1,) * lengths.prompt,
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(lengths.output),
        arrival=float(number),
        samples=((),) * (1 if beams else width),
        beam_search=BeamSearch(width) if beams else None,
    )


LENGTHS = st.builds(Lengths, st.integers(1, 9), st.integers(1, 6))


@given(
    st.lists(st.tuples(LENGTHS, st.integers(1, 3), st.booleans()), min_size=1, max_size=5),
    st.sampled_from(["oracle", "pow2", "max"]),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_request_runs_to_its_end_without_preemption(
    requests: list[tuple[Lengths, int, bool]], policy: str, block_size: int, static: bool
) -> None:
    widths = [(lengths, width, False) for lengths, width, _ in requests]
    kinds = [(lengths, width, True) for lengths, width, beams in requests if beams]
    for batch in (widths, kinds):
        demands = {f"r{number}": Demand(lengths, width) for number, (lengths, width, _) in enumerate(batch)}
        blocks = ContiguousBlocks(64, block_size, reservations(16)[policy], demands, static_batches=static)
        made = [request_of(number, lengths, width, beams=beams) for number, (lengths, width, beams) in enumerate(batch)]
        scheduler = run(blocks, Capacity(16, 50_000, block_size, 64), made)
        assert scheduler.totals.preemptions == 0
        assert scheduler.available_blocks == 64
        if batch:
            assert slots_in_use(blocks) == 0


def slots_in_use(blocks: ContiguousBlocks) -> float:
    tokens, reserved, internal, _ = blocks.shares({})
    return tokens + reserved + internal
