"""A record of operations is replayed to the same ids, and what was changed in it is found at its Step."""

import json
import random
from dataclasses import asdict

import pytest

from blocks import Allocate, Step
from kvmanager import Pool, PoolReport, report_of
from kvmanager.history.record import InvalidRecord, OperationsRecord, OperationsReplay, RecordParted
from tests.kvmanager.test_report import adopted, random_step, spec

STEPS = 25


def a_record(seed, steps_before=0):
    """The lines of a record that begins after some Steps, and the pool as it was in the end."""
    draw = random.Random(seed)
    pool = Pool(spec())
    for number in range(1, steps_before + 1):
        pool.apply(random_step(pool, draw, number))
    record = OperationsRecord(pool.spec)
    lines = list(record.begin(report_of(pool), "2026-01-01T00:00:00+00:00"))
    for number in range(100, 100 + STEPS):
        step = random_step(pool, draw, number)
        lines += record.applied(step, pool.apply(step))
    return [*lines, *record.end("the session ended")], pool


def replayed(lines):
    replay = OperationsReplay.of(lines[0])
    for line in lines[1:]:
        replay.take(line)
    return replay


def is_step(line):
    return "step" in json.loads(line)


@pytest.mark.parametrize("steps_before", [0, 1, 15])
@pytest.mark.parametrize("seed", range(20))
def test_a_recorded_session_of_random_steps_replays_to_the_same_checksum_and_pool(seed, steps_before):
    lines, pool = a_record(seed, steps_before)
    replay = replayed(lines)
    assert (replay.steps, replay.end) == (STEPS, "the session ended")
    assert replay.checksum == json.loads(lines[-2])["checksum"]
    assert report_of(replay.pool) == report_of(pool)


@pytest.mark.parametrize("seed", range(20))
def test_what_an_audit_withheld_is_withheld_in_the_replay(seed):
    draw = random.Random(seed)
    pool = Pool(spec())
    record = OperationsRecord(pool.spec)
    lines = list(record.begin(report_of(pool), ""))
    for number in range(1, 30):
        if number % 10 == 0:
            pool.withhold([draw.randint(1, pool.device.total)], [draw.randint(1, pool.host.total)])
        step = random_step(pool, draw, number)
        lines += record.applied(step, pool.apply(step))
    assert pool.device.marks.withheld() or pool.device.marks.withheld_on_release()
    assert report_of(replayed(lines).pool) == report_of(pool)


def test_a_record_may_begin_with_a_pool_that_holds_nothing():
    record = OperationsRecord(spec())
    pool = adopted(spec(), PoolReport(last_step=7))
    step = Step(8, allocates=[Allocate(1, 1, "request", b"", [1, 2, 3], 3)])
    lines = [*record.begin(PoolReport(last_step=7), ""), *record.applied(step, pool.apply(step))]
    replay = replayed(lines)
    assert report_of(replay.pool) == report_of(pool)
    assert replay.end is None


def test_a_large_snapshot_is_written_in_many_short_lines():
    pool = Pool(spec(device_blocks=50_000))
    lines = list(OperationsRecord(pool.spec).begin(report_of(pool), ""))
    assert max(map(len, lines)) < 10_000
    assert report_of(replayed(lines).pool) == report_of(pool)


def numbers_in(value, path=()):
    """Paths of all numbers."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers_in(inner, (*path, name))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from numbers_in(inner, (*path, position))
    elif type(value) is int:
        yield path


def with_another_number(line, path):
    content = json.loads(line)
    inner = content
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] += 1
    return json.dumps(content)


@pytest.mark.parametrize("seed", range(40))
def test_one_changed_number_is_found_at_the_right_step(seed):
    lines, _ = a_record(seed, steps_before=10)
    draw = random.Random(seed)
    position = draw.choice([position for position, line in enumerate(lines) if is_step(line)])
    step = json.loads(lines[position])["step"]
    path = draw.choice([path for path in numbers_in(json.loads(lines[position])) if path != ("step",)])
    lines[position] = with_another_number(lines[position], path)
    replay = OperationsReplay.of(lines[0])
    for line in lines[1:position]:
        replay.take(line)
    # A number that is none of its kind, such as a reason that does not exist, cannot be read at all.
    with pytest.raises((RecordParted, InvalidRecord)) as found:
        replay.take(lines[position])
    if isinstance(found.value, RecordParted):
        assert found.value.step == step
    else:
        assert f"line {position + 1} " in str(found.value)


def test_a_core_that_answers_otherwise_is_found_at_the_right_step(monkeypatch):
    lines, _ = a_record(3)
    steps = [json.loads(line)["step"] for line in lines if is_step(line)]
    apply = Pool.apply

    def answers_otherwise(self, step):
        applied = apply(self, step)
        if step.step >= steps[7] and applied.result.tables:
            first, *others = applied.result.tables
            tables = (first._replace(block_ids=[9, 9]), *others)
            return applied._replace(result=applied.result._replace(tables=tables))
        return applied

    monkeypatch.setattr(Pool, "apply", answers_otherwise)
    with pytest.raises(RecordParted, match="the core answers it otherwise") as found:
        replayed(lines)
    assert found.value.step >= steps[7]


def test_a_changed_snapshot_a_missing_step_and_a_repeated_one_are_found():
    lines, _ = a_record(5, steps_before=10)
    with pytest.raises(RecordParted, match="the snapshot") as found:
        replayed([lines[0], with_another_number(lines[1], ("snapshot", "resets")), *lines[2:]])
    assert found.value.step is None
    first = next(position for position, line in enumerate(lines) if is_step(line))
    with pytest.raises(RecordParted, match="step 103"):
        replayed([*lines[: first + 2], *lines[first + 3 :]])
    with pytest.raises(RecordParted, match="step 102 cannot follow"):
        replayed([*lines[: first + 3], *lines[first + 2 :]])


@pytest.mark.parametrize(
    ("position", "line", "said"),
    [
        (0, "no JSON", "line 1 is no JSON"),
        (0, "[]", "line 1 is no JSON object"),
        (0, '{"format": "other", "version": 1}', "line 1 says format 'other', version 1"),
        (0, '{"format": "quire-operations", "version": 2}', "version 2; read here is"),
        (0, '{"format": "quire-operations", "version": 1}', "line 2 cannot be read: KeyError"),
        (-3, "{", "is no JSON"),
        (-3, "{}", "cannot be read: KeyError: 'step'"),
        (-3, '{"step": "one"}', "cannot be read: TypeError"),
        (-3, '{"step": 999, "commits": [[1, 0, [4294967296]]]}', "cannot be read: OverflowError"),
        (-3, '{"end": "early"}', "follows the last line"),
    ],
)
def test_what_is_no_record_is_refused_saying_which_line(position, line, said):
    lines, _ = a_record(1)
    lines[position] = line
    with pytest.raises(InvalidRecord) as refused:
        replayed(lines)
    assert said in str(refused.value)


def test_the_header_says_what_is_in_it():
    header = json.loads(a_record(1)[0][0])
    assert header["format"] == "quire-operations"
    assert header["sensitive"] == "contains token ids"
    assert header["spec"] == asdict(spec())
    assert header["engine_id"] == "engine"
    assert "every Step of block operations" in header["contains"]
