"""Steps and reports of pools with window kinds that an engine of this tree never sends."""

from dataclasses import replace

import pytest

from blocks import Commit, Extend, Fork, Step, Trim, WindowKind
from kvmanager import InvalidReport, KVManager, Pool, PoolSpec, adopt, parts
from kvmanager.report import report_of
from tests.kvmanager.test_faults_of_peers import SIZE, WINDOW, Client, pool_of
from tests.kvmanager.tiny_pools import end_of


@pytest.mark.parametrize("done", range(9))
@pytest.mark.parametrize("first", range(3))
def test_blocks_may_be_committed_after_they_have_left_the_window(done, first):
    text = list(range(40))
    client, twin = Client(pool_of()), Client(pool_of(tokens=len(text)))
    for one in (client, twin):
        one.begin(1, text)
        one.step(commits=[Commit(1, 0, text[: first * SIZE])] if first else [], trims=[Trim(1, 14)])
        if done > first:
            one.step(commits=[Commit(1, first, text[first * SIZE : done * SIZE])])
    own = client.window.sequences[1]
    assert own.committed_blocks == max(first, done)
    keys = [client.window.device.key(block) for block in own.table]
    of_all = [twin.window.device.key(block) for block in twin.window.sequences[1].table]
    assert keys == of_all[own.dropped :]
    assert own.dropped == (14 - WINDOW + 1) // SIZE


def test_blocks_are_counted_at_each_pause_of_a_swap_in_whose_first_table_is_empty(monkeypatch):
    """The fork stays within its parent's first block, and has nothing in the window that both have left."""
    monkeypatch.setattr(parts, "PART", 1)
    window = WindowKind("window", 1, 8, 8)
    pool = Pool(PoolSpec("engine", 1, "model", SIZE, 8, 8, windows=(window,)))
    client = Client(pool)
    client.begin(1, [1, 2, 3, 4])
    client.step(forks=[Fork(1, 2, 4)])
    client.step(extends=[Extend(1, ((2, 6),))])
    client.step(trims=[Trim(1, 4), Trim(2, 4)])
    assert [pool.windows[0].sequences[number].table for number in (1, 2)] == [[], [3]]
    client.step(swap_outs=[1])
    pool.state.stepping = True
    for _ in pool.applying(Step(pool.last_step + 1, swap_ins=[1]), budget=1):
        assert pool.violations() == []
    assert not pool.sequences[1].swapped


@pytest.fixture
def report():
    client = Client(pool_of())
    client.begin(1, list(range(9)))
    client.compute(1, 9)
    return client.pool.spec, report_of(client.pool)


def change(report, **fields):
    report.windows[0].sequences[0] = replace(report.windows[0].sequences[0], **fields)


CONTRADICTIONS = {
    "kind window: resets must be those of kind 0, 0, not 1": lambda own: setattr(own.windows[0], "resets", 1),
    "kind window: last_applied_step must be that of kind 0": lambda own: setattr(own.windows[0], "last_step", 1),
    "request_id of sequence 1 differs from kind 0": lambda own: change(own, request_id="other"),
    "salt of sequence 1 differs from kind 0": lambda own: change(own, salt=b"other"),
    "prompt_tokens of sequence 1 differs from kind 0": lambda own: change(own, prompt_tokens=8),
    "group of sequence 1 differs from kind 0": lambda own: change(own, group=2),
    "retained must be between 0 and 4, the whole blocks of its prompt": lambda own: change(own, retained=(1, 5)),
    "sequence 1: retained must be between": lambda own: change(own, retained=(-1,)),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_report_whose_kinds_contradict_each_other_is_refused_by_name(report, message):
    spec, own = report
    end_of(adopt(spec, own))
    CONTRADICTIONS[message](own)
    with pytest.raises(InvalidReport, match=message):
        end_of(adopt(spec, own))


def test_audits_go_on_after_a_step_that_a_fault_of_the_core_has_ended(monkeypatch):
    window = WindowKind("window", WINDOW, 8)
    manager = KVManager(epoch=1)
    session = manager.attach(PoolSpec("engine", 1, "model", SIZE, 8, windows=(window,)))
    monkeypatch.setattr(session.pool, "applying", lambda *_: _failing())
    with pytest.raises(ZeroDivisionError):
        list(manager.applying(session, "a step", 100))
    assert not session.stepping


def _failing():
    yield
    return 1 / 0
