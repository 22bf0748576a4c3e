"""The contract of the BlockManager protocol, tested on the core and on the service over a stream."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocks import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Pin,
    Step,
    StepItem,
    StepResult,
    TableChange,
)
from engine.run.loop import Engine
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.outputs import Finished, Tokens
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from simulation.runner import DigestRunner, expected_tokens
from tests.contract.block_managers import (
    Link,
    Manager,
    Refused,
    answer,
    answers_until_disconnected,
    answers_until_reattached,
    next_answer,
    wait_until_disconnected,
)

BLOCK = 2
BLOCKS = 6


@pytest.fixture
def link(manager: Manager) -> Link:
    return manager.attach(BLOCK, BLOCKS)


def allocate(sequence: int, token_ids: list[int], compute: int = 100, spare: int = 0, salt: bytes = b"") -> Allocate:
    return Allocate(sequence, sequence, f"request {sequence}", salt, token_ids, compute, spare)


def refused(result: StepResult) -> list[tuple[StepItem, int]]:
    return [(refusal.item, refusal.position) for refusal in result.refusals]


class TestVerbs:
    def test_an_allocated_sequence_has_a_table_and_room(self, manager: Manager, link: Link) -> None:
        assert link.blocks.ready
        result = answer(link, Step(1, allocates=[allocate(7, [1, 2, 3])]))
        assert result == StepResult(1, (), (TableChange(7, 0, [1, 2], 4, 0),), (), 4)
        pool = manager.pool()
        one = pool.sequences[7]
        assert (one.group, one.request_id, one.table, one.room_tokens) == (7, "request 7", [1, 2], 4)
        assert (pool.spec.block_size, pool.spec.device_blocks) == (BLOCK, BLOCKS)

    def test_a_salt_keeps_prefixes_apart(self, link: Link) -> None:
        answer(link, Step(1, allocates=[allocate(1, [1, 2, 3], salt=b"\x00\xff")]))
        answer(link, Step(2, commits=[Commit(1, 0, [1, 2])]))
        tables = answer(
            link, Step(3, allocates=[allocate(2, [1, 2, 3]), allocate(3, [1, 2, 3], salt=b"\x00\xff")])
        ).tables
        assert [table.cached_tokens for table in tables] == [0, 2]

    def test_blocks_freed_in_a_step_are_granted_in_the_same_step(self, link: Link) -> None:
        answer(link, Step(1, allocates=[allocate(1, [1] * 12)]))
        step = Step(2, frees=[Free(1, FreeReason.PREEMPTED, 2)], allocates=[allocate(2, [2] * 12)])
        result = answer(link, step)
        assert refused(result) == []
        assert sorted(result.tables[0].block_ids) == [1, 2, 3, 4, 5, 6]
        assert result.available_blocks == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("step", "item", "detail"),
        [
            (Step(9, condemns=[Condemn(1, [], CondemnReason.HIT)]), StepItem.CONDEMN, "blocks must not be empty"),
            (
                Step(9, condemns=[Condemn(1, [1, 7], CondemnReason.COPY)]),
                StepItem.CONDEMN,
                "blocks must be between 1 and 6, the device blocks, not 7",
            ),
            (
                Step(9, condemns=[Condemn(0, [1], CondemnReason.HOST_HIT, host=True)]),
                StepItem.CONDEMN,
                "blocks must be between 1 and 0, the host blocks, not 1",
            ),
            (
                Step(9, condemns=[Condemn(0, [1], CondemnReason.SWAP_IN, kind=1)]),
                StepItem.CONDEMN,
                "kind must be between 0 and 0, not 1",
            ),
            (Step(9, commits=[Commit(1, 1, [1, 2])]), StepItem.COMMIT, "first_index must be 0"),
            (Step(9, pins=[Pin("p", 9, 1)]), StepItem.PIN, "sequence 9 does not exist"),
            (Step(9, forks=[Fork(9, 3, 1)]), StepItem.FORK, "sequence 9 does not exist"),
            (Step(9, frees=[Free(5, FreeReason.FAILED)]), StepItem.FREE, "sequence 5 does not exist"),
            (Step(9, swap_outs=[9]), StepItem.SWAP_OUT, "group 9 does not exist"),
            (Step(9, extends=[Extend(1, [(1, 2**31 - 1)])]), StepItem.EXTEND, "blocks are needed, 4 are available"),
            (Step(9, allocates=[allocate(1, [1])]), StepItem.ALLOCATE, "sequence 1 already exists"),
            (Step(9, lengths=[Length(1, 5)]), StepItem.LENGTH, "tokens must be between 0 and 4"),
        ],
    )
    def test_a_refused_item_is_named_and_changes_nothing(
        self, manager: Manager, link: Link, step: Step, item: StepItem, detail: str
    ) -> None:
        answer(link, Step(1, allocates=[allocate(1, [1, 2, 3])]))
        result = answer(link, step)
        [refusal] = result.refusals
        assert refusal[:2] == (item, 0)
        assert detail in refusal.detail
        assert (result.tables, result.copies, result.available_blocks) == ((), (), 4)
        assert list(manager.pool().sequences) == [1]
        assert manager.pool().violations() == []


class TestAnswers:
    def test_arrive_in_the_order_of_the_steps(self, link: Link) -> None:
        for number in range(1, 60):
            link.blocks.send(Step(number, frees=[Free(number, FreeReason.FINISHED)]))
        results = [next_answer(link) for _ in range(1, 60)]
        assert [result.step for result in results] == list(range(1, 60))
        assert all(f"sequence {result.step} does not exist" in result.refusals[0].detail for result in results)
        assert link.blocks.receive() is None

    def test_a_large_step_is_answered_completely(self, manager: Manager) -> None:
        link = manager.attach(16, 60_000)
        prompt = list(range(400_000))
        result = answer(link, Step(1, allocates=[allocate(1, prompt, compute=len(prompt))]))
        assert result.tables[0].block_ids == list(range(1, 25_001))
        result = answer(link, Step(2, commits=[Commit(1, 0, prompt)], frees=[Free(1, FreeReason.FINISHED)]))
        assert refused(result) == []
        result = answer(link, Step(3, allocates=[allocate(2, prompt, compute=len(prompt))]))
        assert result.tables[0].cached_tokens == 399_984


class TestAbsence:
    """The manager restarts with empty pools."""

    def test_a_restart_is_reported_once_and_the_pool_is_restored(self, manager: Manager, link: Link) -> None:
        answer(link, Step(1, allocates=[allocate(1, [1, 2, 3])]))
        answer(link, Step(2, commits=[Commit(1, 0, [1, 2])]))
        manager.stop()
        wait_until_disconnected(link)
        assert link.blocks.receive() is None
        manager.start()
        assert answers_until_reattached(link) == ([], 4)
        assert link.blocks.ready
        assert link.blocks.receive() is None
        result = answer(link, Step(3, allocates=[allocate(2, [1, 2, 3])]))
        assert result == StepResult(3, (), (TableChange(2, 0, [1, 3], 4, 2),), (), 3)
        assert list(manager.pool().sequences) == [1, 2]

    def test_a_step_sent_before_the_disconnect_was_noticed_is_granted_nothing(
        self, manager: Manager, link: Link
    ) -> None:
        manager.stop()
        manager.start()
        if link.blocks.ready:
            link.blocks.send(Step(1, allocates=[allocate(1, [1, 2, 3])]))
        assert answers_until_reattached(link) == ([], BLOCKS)
        result = answer(link, Step(2, allocates=[allocate(2, [4])]))
        assert result == StepResult(2, (), (TableChange(2, 0, [1], 2, 0),), (), 5)
        assert list(manager.pool().sequences) == [2]

    def test_unanswered_frees_and_commits_survive_a_restart(self, manager: Manager, link: Link) -> None:
        answer(link, Step(1, allocates=[allocate(1, [1, 2, 3]), allocate(2, [4])]))
        ended = Free(1, FreeReason.FINISHED)
        link.blocks.send(Step(2, commits=[Commit(1, 0, [1, 2])], frees=[ended], allocates=[allocate(3, [5])]))
        manager.stop()
        answers_until_disconnected(link)
        manager.start()
        answers_until_reattached(link)
        assert 1 not in manager.pool().sequences
        assert answer(link, Step(3, allocates=[allocate(4, [1, 2, 3])])).tables[0].cached_tokens == 2

    def test_the_eviction_order_is_rebuilt(self, manager: Manager, link: Link) -> None:
        answer(link, Step(1, allocates=[allocate(number, [number, number]) for number in (1, 2, 3, 4)]))
        commits = [Commit(number, 0, [number, number]) for number in (3, 1)]
        frees = [Free(number, FreeReason.FINISHED) for number in (3, 2, 1)]
        answer(link, Step(2, commits=commits, frees=frees))
        before = manager.pool().device.eviction_order()
        manager.stop()
        manager.start()
        answers_until_reattached(link)
        assert manager.pool().device.eviction_order() == before == [5, 6, 2, 3, 1]


class TestWithheldBlocks:
    def test_withheld_blocks_are_in_the_next_answer_and_survive_a_restart(self, manager: Manager, link: Link) -> None:
        answer(link, Step(1, allocates=[allocate(1, [1, 2, 3])]))
        manager.pool().withhold([2, 5], [])
        result = answer(link, Step(2, allocates=[allocate(2, [4])]))
        assert (result.withheld_blocks, result.available_blocks) == ((2, 5), 2)
        result = answer(link, Step(3, frees=[Free(1, FreeReason.FINISHED)]))
        assert (result.withheld_blocks, result.available_blocks) == ((), 3)
        manager.stop()
        wait_until_disconnected(link)
        manager.start()
        assert answers_until_reattached(link) == ([], 3)
        assert manager.pool().device.marks.withheld() == [2, 5]

    def test_condemned_blocks_are_withheld_without_being_listed_and_survive_a_restart(
        self, manager: Manager, link: Link
    ) -> None:
        answer(link, Step(1, allocates=[allocate(1, [1, 2, 3])]))
        condemns = [Condemn(1, [2, 5], CondemnReason.HIT), Condemn(0, [5], CondemnReason.COPY)]
        result = answer(link, Step(2, condemns=condemns, commits=[Commit(1, 0, [1, 2])]))
        assert result == StepResult(2, (), (), (), 3)
        result = answer(link, Step(3, frees=[Free(1, FreeReason.FINISHED)]))
        assert (result.withheld_blocks, result.available_blocks) == ((), 4)
        manager.stop()
        wait_until_disconnected(link)
        manager.start()
        assert answers_until_reattached(link) == ([], 4)
        assert manager.pool().device.marks.withheld() == [2, 5]
        assert manager.pool().violations() == []

    def test_a_condemned_prefix_is_computed_again_and_a_new_block_takes_its_key(
        self, manager: Manager, link: Link
    ) -> None:
        answer(link, Step(1, allocates=[allocate(1, [1, 2, 3])]))
        answer(link, Step(2, commits=[Commit(1, 0, [1, 2])], frees=[Free(1, FreeReason.FINISHED)]))
        step = Step(3, condemns=[Condemn(0, [1], CondemnReason.ADOPTION)], allocates=[allocate(2, [1, 2, 3])])
        [table] = answer(link, step).tables
        assert (table.cached_tokens, 1 in table.block_ids) == (0, False)
        answer(link, Step(4, commits=[Commit(2, 0, [1, 2])]))
        [again] = answer(link, Step(5, allocates=[allocate(3, [1, 2, 3])])).tables
        assert (again.cached_tokens, again.block_ids[0]) == (2, table.block_ids[0])

    def test_a_manager_whose_pool_differs_gets_the_engines_report(self, make_manager: Callable[[str], Manager]) -> None:
        manager = make_manager("over gRPC")
        link = manager.attach(BLOCK, BLOCKS)
        answer(link, Step(1, allocates=[allocate(1, [1, 2, 3])]))
        free = manager.pool().device.free.blocks
        free.append(free.pop(2))
        result = answer(link, Step(2, allocates=[allocate(2, [4])]))
        assert result.tables == (TableChange(2, 0, [3], 2, 0),), "the engine's own replica decides"
        assert answers_until_reattached(link) == ([], 3)
        assert manager.pool().sequences[2].table == [3]
        assert answer(link, Step(3, allocates=[allocate(3, [4])])).tables == (TableChange(3, 0, [4], 2, 0),)
        assert manager.pool().violations() == []


class TestIncarnations:
    def test_an_older_one_is_refused_and_changes_nothing(self, manager: Manager) -> None:
        newer = manager.attach(BLOCK, BLOCKS, incarnation=2)
        answer(newer, Step(1, allocates=[allocate(1, [1, 2, 3])]))
        with pytest.raises(Refused, match="incarnation 1 is older than the attached 2"):
            manager.attach(BLOCK, BLOCKS, incarnation=1)
        assert answer(newer, Step(2)).available_blocks == 4


ids = st.integers(1, 5)
tokens = st.lists(st.integers(0, 1), max_size=9)
steps = st.lists(
    st.builds(
        Step,
        step=st.just(0),
        condemns=st.lists(
            st.builds(
                Condemn,
                st.integers(0, 5),
                st.lists(st.integers(0, BLOCKS + 1), max_size=2),
                st.sampled_from(CondemnReason),
                host=st.sampled_from([False, False, False, True]),
                kind=st.sampled_from([0, 0, 0, 1]),
            ),
            max_size=1,
        ),
        commits=st.lists(st.builds(Commit, ids, st.integers(0, 3), tokens), max_size=2),
        frees=st.lists(st.builds(Free, ids, st.sampled_from(FreeReason), ids), max_size=2),
        extends=st.lists(
            st.builds(Extend, ids, st.lists(st.tuples(ids, st.integers(-1, 14)), min_size=1, max_size=2)), max_size=2
        ),
        allocates=st.lists(
            st.builds(
                allocate,
                ids,
                tokens,
                compute=st.integers(0, 9),
                spare=st.integers(-1, 3),
                salt=st.sampled_from([b"", b"\xff\x00"]),
            ),
            max_size=3,
        ),
        lengths=st.lists(st.builds(Length, ids, st.integers(-1, 12)), max_size=2),
    ),
    min_size=1,
    max_size=12,
)


def test_random_steps_have_the_same_answers_in_process_and_over_grpc(make_manager: Callable[[str], Manager]) -> None:
    core, wire = make_manager("in process"), make_manager("over gRPC")
    incarnations = 0
    accepted = 0

    @settings(
        max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @given(steps)
    def same(sequence_of_steps: list[Step]) -> None:
        nonlocal incarnations, accepted
        incarnations += 1
        links = [manager.attach(BLOCK, BLOCKS, incarnation=incarnations) for manager in (core, wire)]
        for number, step in enumerate(sequence_of_steps, 1):
            one, other = (answer(link, replace(step, step=number)) for link in links)
            assert one == other
            accepted += len(one.tables)
        assert core.pool().violations() == wire.pool().violations() == []
        assert core.pool().device.eviction_order() == wire.pool().device.eviction_order()
        assert core.pool().computed_tokens() == wire.pool().computed_tokens()

    same()
    assert accepted > 100


@pytest.mark.parametrize("restart", [False, True])
def test_an_engine_generates_the_same_tokens_with_either_manager(manager: Manager, link: Link, restart: bool) -> None:
    capacity = Capacity(40, 50, BLOCK, BLOCKS)
    scheduler = Scheduler(capacity, Limits(8, 4, 20))
    engine = Engine(scheduler, DigestRunner(capacity), link.blocks, lambda: 0.0)
    prompts = [tuple(range(length)) for length in range(1, 7)]
    for number, prompt in enumerate(prompts):
        scheduler.requests.submit(Request(f"{number}", prompt, Sampling(seed=number), Stopping(6)))
    received: dict[str, list[int]] = {f"{number}": [] for number in range(len(prompts))}
    ends = 0
    while not scheduler.empty:
        turn = engine.turn()
        assert engine.last_failure is None
        for output in turn.outputs:
            if isinstance(output, Tokens):
                received[output.request_id] += output.token_ids
            ends += isinstance(output, Finished)
        if restart and ends == 2:
            restart = False
            manager.stop()
            manager.start()
        if turn.idle is not None:
            link.wait()
    assert list(received.values()) == [
        expected_tokens(prompt, number, 6, frozenset(), 50) for number, prompt in enumerate(prompts)
    ]
    assert ends == len(prompts)
    assert manager.pool().violations() == []
    assert manager.pool().device.counts.held == 0
