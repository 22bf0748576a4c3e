"""Replays of recorded operations, and the Steps at which changed records are detected."""

import random
from dataclasses import dataclass, field, replace

import pytest

from blocks import Allocate, Commit, Condemn, CondemnReason, Extend, Free, FreeReason, Length, Step, Trim, WindowKind
from kvmanager import Pool, PoolReport, PoolSpec, report_of
from kvmanager.history.record import Checksum, OperationsReplay, ReplayMismatch, Withheld
from tests.kvmanager.test_report import adopted, random_step, spec

STEPS = 25


@dataclass
class Session:
    """A recorded pool: each Step with the blocks withheld before it and the checksum after it."""

    pool: Pool
    spec: PoolSpec = field(init=False)
    report: PoolReport = field(init=False)
    begun: bytes = field(init=False)
    steps: list[tuple[Step, list[Withheld], bytes]] = field(default_factory=list)

    def __post_init__(self):
        self.spec, self.report = self.pool.spec, report_of(self.pool)
        self.checksum = Checksum(self.spec)
        for _ in self.checksum.adding(self.report):
            pass
        self.begun = self.checksum.digest

    def apply(self, step):
        applied = self.pool.apply(step)
        self.checksum.add(step, applied)
        results = (applied.result, *applied.result.windows)
        withheld = [(one.withheld_blocks, one.host_withheld_blocks) for one in results]
        self.steps.append((step, withheld, self.checksum.digest))


def a_session(seed, steps_before=0):
    draw = random.Random(seed)
    pool = Pool(spec())
    for number in range(1, steps_before + 1):
        pool.apply(random_step(pool, draw, number))
    session = Session(pool)
    for number in range(100, 100 + STEPS):
        session.apply(random_step(pool, draw, number))
    return session


def replayed(session):
    replay = OperationsReplay(session.spec)
    replay.adopt(session.report, session.begun)
    for recorded in session.steps:
        replay.apply(*recorded)
    return replay


@pytest.mark.parametrize("steps_before", [0, 1, 15])
@pytest.mark.parametrize("seed", range(20))
def test_a_recorded_session_of_random_steps_replays_to_the_same_checksum_and_pool(seed, steps_before):
    session = a_session(seed, steps_before)
    replay = replayed(session)
    assert replay.steps == STEPS
    assert replay.checksum == session.steps[-1][-1].hex()
    assert report_of(replay.pool) == report_of(session.pool)


@pytest.mark.parametrize("seed", range(20))
def test_withheld_blocks_are_withheld_in_the_replay(seed):
    draw = random.Random(seed)
    session = Session(Pool(spec()))
    pool = session.pool
    for number in range(1, 30):
        if number % 10 == 0:
            pool.withhold([draw.randint(1, pool.device.total)], [draw.randint(1, pool.host.total)])
        session.apply(random_step(pool, draw, number))
    assert report_of(pool).device.withheld
    assert report_of(replayed(session).pool) == report_of(pool)


def test_a_record_may_start_with_an_empty_pool():
    session = Session(adopted(spec(), PoolReport(last_step=7)))
    session.apply(Step(8, allocates=[Allocate(1, 1, "request", b"", [1, 2, 3], 3)]))
    assert report_of(replayed(session).pool) == report_of(session.pool)


def test_checksums_do_not_depend_on_the_sequence_type():
    allocate = Allocate(1, 1, "request", b"salt", [1, 2, 3], 3)
    sums = set()
    for step in (Step(1, allocates=[allocate]), Step(1, allocates=(allocate._replace(token_ids=(1, 2, 3)),))):
        session = Session(Pool(PoolSpec("engine", 1, "model", 4, 8)))
        session.apply(step)
        sums.add(session.checksum.digest.hex())
    # A change of this checksum needs a new version of the format.
    assert sums == {"a2f1b99eabfb3abc3a0e343f1e8607258544834bfbb69acd7e99a0247965527e"}


def changes_of(value):
    """Yield copies of a value with one number or text changed."""
    match value:
        case bool() | None:
            pass
        case int() | float():
            yield value + 1
        case str():
            yield value + "x"
        case bytes():
            yield value + b"x"
        case tuple() if hasattr(value, "_replace"):
            yield from (type(value)(*fields) for fields in changes_of(list(value)))
        case list() | tuple():
            for position, inner in enumerate(value):
                for changed in changes_of(inner):
                    yield [*value[:position], changed, *value[position + 1 :]]


def changed_steps(step):
    """Yield copies of a Step with one number or text of an item changed, but for prefix_of, which changes no result."""
    for name, items in vars(step).items():
        if name != "step":
            for changed in changes_of(list(items)):
                if name != "allocates" or not any(one[8] for one in changed):
                    yield replace(step, **{name: changed})


@pytest.mark.parametrize("seed", range(40))
def test_one_changed_value_is_found_at_the_right_step(seed):
    session = a_session(seed, steps_before=10)
    draw = random.Random(seed)
    choices = [position for position, (step, *_) in enumerate(session.steps) if list(changed_steps(step))]
    position = draw.choice(choices)
    step, *rest = session.steps[position]
    session.steps[position] = (draw.choice(list(changed_steps(step))), *rest)
    with pytest.raises(ReplayMismatch) as found:
        replayed(session)
    assert found.value.step == step.step


def test_a_differing_answer_of_the_core_is_found_at_the_right_step(monkeypatch):
    session = a_session(3)
    numbers = [step.step for step, *_ in session.steps]
    apply = Pool.apply

    def answers_otherwise(self, step):
        applied = apply(self, step)
        if step.step >= numbers[7] and applied.result.tables:
            first, *others = applied.result.tables
            tables = (first._replace(block_ids=[9, 9]), *others)
            return applied._replace(result=applied.result._replace(tables=tables))
        return applied

    monkeypatch.setattr(Pool, "apply", answers_otherwise)
    with pytest.raises(ReplayMismatch, match="the core's result") as found:
        replayed(session)
    assert found.value.step >= numbers[7]


def test_a_changed_snapshot_a_missing_step_and_a_repeated_one_are_found():
    session = a_session(5, steps_before=10)
    session.report.resets += 1
    with pytest.raises(ReplayMismatch, match="the snapshot") as found:
        replayed(session)
    assert found.value.step is None
    session.report.resets -= 1
    missing = session.steps.pop(2)
    with pytest.raises(ReplayMismatch, match="step 103"):
        replayed(session)
    session.steps.insert(2, missing)
    session.steps.insert(3, missing)
    with pytest.raises(ReplayMismatch, match="step 102 is out of order"):
        replayed(session)


def a_session_with_windows(**kind):
    """A sequence of 12 tokens whose first blocks leave a window, is swapped out and in, and ends."""
    given = {"tokens": 5, "device_blocks": 6, "host_blocks": 6, **kind}
    session = Session(Pool(PoolSpec("engine", 1, "model", 4, 8, 8, windows=(WindowKind("window", **given),))))
    session.apply(Step(1, allocates=[Allocate(1, 1, "request", b"", [*range(12)], 12, window_spares=(0,))]))
    session.apply(Step(2, commits=[Commit(1, 0, [*range(12)])], trims=[Trim(1, 9)], extends=[Extend(1, ((1, 16),))]))
    session.pool.withhold([], [], 0)
    session.pool.withhold([5], [3], 1)
    session.apply(Step(3, swap_outs=[1]))
    session.apply(Step(4, swap_ins=[1], lengths=[Length(1, 13)]))
    session.apply(Step(5, trims=[Trim(1, 12)], frees=[Free(1, FreeReason.FINISHED)]))
    return session


def test_a_session_with_window_kinds_replays_to_the_same_pool():
    session = a_session_with_windows()
    assert [len(step.trims) for step, *_ in session.steps] == [0, 1, 0, 0, 1]
    replay = replayed(session)
    assert report_of(replay.pool) == report_of(session.pool)
    assert replay.pool.windows[0].device.counts.withheld == 1


@pytest.mark.parametrize("changed", [{"tokens": 4}, {"chunked": True}, {"device_blocks": 7}, {"host_blocks": 5}])
def test_a_changed_window_kind_is_found_in_the_snapshot(changed):
    session, other = a_session_with_windows(), a_session_with_windows(**changed)
    session.spec = other.spec
    with pytest.raises(ReplayMismatch, match="the pool in the header"):
        replayed(session)


def test_each_changed_value_of_a_step_with_trims_is_found():
    session = a_session_with_windows()
    for position in (0, 1, 4):
        step, *rest = session.steps[position]
        for changed in changed_steps(step):
            session.steps[position] = (changed, *rest)
            with pytest.raises(ReplayMismatch) as found:
                replayed(session)
            assert found.value.step == step.step
        session.steps[position] = (step, *rest)


def a_session_with_condemns():
    session = a_session_with_windows()
    prompt = Allocate(2, 2, "request", b"", [*range(9)], 9, window_spares=(0,))
    session.apply(Step(6, allocates=[prompt]))
    blocks = session.pool.sequences[2].table[:2]
    condemns = [
        Condemn(2, blocks, CondemnReason.ADOPTION),
        Condemn(0, [1, 2], CondemnReason.SWAP_IN, host=True),
        Condemn(2, [1], CondemnReason.HOST_HIT, kind=1),
    ]
    session.apply(Step(7, condemns=condemns))
    session.apply(Step(8, frees=[Free(2, FreeReason.FINISHED)]))
    return session


def test_condemned_blocks_are_withheld_in_the_replay_of_their_step():
    session = a_session_with_condemns()
    assert [tier.counts.withheld for kind in session.pool.state.kinds for tier in (kind.device, kind.host)] == [
        *(2, 2),
        *(2, 1),
    ]
    replay = replayed(session)
    assert report_of(replay.pool) == report_of(session.pool)
    assert replay.checksum == session.steps[-1][-1].hex()


def test_each_changed_value_of_a_step_with_condemns_is_found():
    session = a_session_with_condemns()
    step, *rest = session.steps[6]
    other = [one._replace(reason=CondemnReason.COPY) for one in step.condemns]
    host = [one._replace(host=not one.host) for one in step.condemns]
    for changed in [*changed_steps(step), replace(step, condemns=other), replace(step, condemns=host)]:
        session.steps[6] = (changed, *rest)
        with pytest.raises(ReplayMismatch) as found:
            replayed(session)
        assert found.value.step == 7
