"""Metric series of pools and their sessions."""

from prometheus_client import generate_latest

from blocks import Allocate, Commit, Condemn, CondemnReason, Extend, Fork, Free, FreeReason, Step
from kvmanager import KVManager, PoolSpec
from services.kvmanager.metrics import KVManagerMetrics
from tests.scrape import Scrape


def spec(engine_id: str, incarnation: int, blocks: int, model: str) -> PoolSpec:
    return PoolSpec(engine_id, incarnation, "fingerprint", 16, blocks, model=model)


def shown(metrics: KVManagerMetrics) -> Scrape:
    return Scrape(generate_latest(metrics.registry).decode())


def test_an_engine_that_attaches_again_has_one_series_from_zero() -> None:
    manager, metrics = KVManager(epoch=1), KVManagerMetrics()
    first = manager.attach(spec("one", 1, 8, "old"))
    metrics.on_attach(first)
    metrics.on_step(first, manager.apply(first, Step(1)), 0.01)
    assert shown(metrics).values("quire_kv_step_seconds_count", "model_name") == {"old": 1}

    second = manager.attach(spec("one", 2, 9, "new"))
    metrics.on_attach(second)
    for _ in range(2):
        assert shown(metrics).values("quire_kv_pool_blocks", "model_name") == {"new": 9}
        assert shown(metrics).values("quire_kv_step_seconds_count", "model_name") == {"new": 0}
        metrics.on_detach(first)  # its stream breaks after the new one starts


def test_every_attached_engine_has_series_until_it_detaches() -> None:
    manager, metrics = KVManager(epoch=1), KVManagerMetrics()
    sessions = [manager.attach(spec(name, 1, blocks, "model")) for name, blocks in (("one", 8), ("two", 9))]
    for session in sessions:
        metrics.on_attach(session)
    assert shown(metrics).values("quire_kv_pool_blocks", "engine") == {"one": 8, "two": 9}
    metrics.on_detach(sessions[0])
    assert shown(metrics).values("quire_kv_pool_blocks", "engine") == {"two": 9}
    metrics.on_detach(sessions[1])
    assert not shown(metrics).has("quire_kv_pool_blocks")


def test_a_pool_with_a_host_tier_has_series_of_both_tiers_and_their_copies() -> None:
    manager, metrics = KVManager(epoch=1), KVManagerMetrics()
    session = manager.attach(PoolSpec("one", 1, "fingerprint", 2, 4, host_blocks=3, model="model"))
    metrics.on_attach(session)
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "r", b"", [1, 2, 3], 3)]))
    manager.apply(session, Step(2, swap_outs=[1]))
    swapped = shown(metrics)
    assert swapped.values("quire_kv_pool_blocks", "tier") == {"device": 4, "host": 3}
    assert swapped.values("quire_kv_blocks", "state", tier="host") == {"free": 1, "cached": 0, "held": 2, "withheld": 0}
    assert swapped.values("quire_kv_moved_blocks_total", "to") == {"host": 2, "device": 0}
    manager.apply(session, Step(3, swap_ins=[1]))
    assert shown(metrics).values("quire_kv_moved_blocks_total", "to") == {"host": 2, "device": 2}


def test_condemned_blocks_are_counted_by_tier_and_reason() -> None:
    manager, metrics = KVManager(epoch=1), KVManagerMetrics()
    session = manager.attach(PoolSpec("one", 1, "fingerprint", 2, 4, host_blocks=3, model="model"))
    metrics.on_attach(session)
    condemns = [
        Condemn(0, [1, 2], CondemnReason.ADOPTION),
        Condemn(0, [2, 3], CondemnReason.HOST_HIT),
        Condemn(0, [1], CondemnReason.COPY, host=True),
    ]
    manager.apply(session, Step(1, condemns=condemns))
    name = "quire_kv_condemned_blocks_total"
    others = {"swap_in": 0, "hit": 0, "recomputation": 0}
    assert shown(metrics).values(name, "reason", tier="device") == others | {"adoption": 2, "host_hit": 1, "copy": 0}
    assert shown(metrics).values(name, "reason", tier="host") == others | {"adoption": 0, "host_hit": 0, "copy": 1}
    blocks = shown(metrics).values("quire_kv_blocks", "state", tier="device")
    assert blocks == {"free": 1, "cached": 0, "held": 0, "withheld": 3}


def test_a_disconnected_pool_is_shown_as_not_connected() -> None:
    manager, metrics = KVManager(epoch=1), KVManagerMetrics()
    session = manager.attach(spec("one", 1, 8, "model"))
    metrics.on_attach(session)
    assert shown(metrics).value("quire_kv_pool_connected") == 1
    manager.mark_disconnected(session)
    assert shown(metrics).value("quire_kv_pool_connected") == 0


def test_slots_of_held_blocks_are_broken_down_by_use() -> None:
    manager, metrics = KVManager(epoch=1), KVManagerMetrics()
    session = manager.attach(PoolSpec("one", 1, "fingerprint", 4, 20, model="model"))
    metrics.on_attach(session)

    def slots() -> dict[str, float]:
        values = shown(metrics).values("quire_kv_slots", "kind")
        assert sum(values.values()) == shown(metrics).value("quire_kv_held_slots")
        return values

    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "r", b"", list(range(10)), 6)]))
    assert slots() == {"tokens": 0, "reserved": 8, "lookahead": 0, "internal": 0}, "two blocks for the first chunk"
    manager.apply(session, Step(2, lengths=[(1, 6)], extends=[Extend(1, [(1, 10)])]))
    assert slots() == {"tokens": 6, "reserved": 4, "lookahead": 0, "internal": 2}
    manager.apply(session, Step(3, lengths=[(1, 10)], extends=[Extend(1, [(1, 14)])]))
    assert slots() == {"tokens": 10, "reserved": 0, "lookahead": 4, "internal": 2}
    manager.apply(session, Step(4, forks=[Fork(1, 2, 10)]))
    assert slots() == {"tokens": 10, "reserved": 0, "lookahead": 0, "internal": 2}, "shared slots count once"
    manager.apply(session, Step(5, extends=[Extend(1, [(2, 11)])], lengths=[(2, 11)]))
    assert slots() == {"tokens": 13, "reserved": 0, "lookahead": 0, "internal": 3}, "the last block was copied"


def test_session_counters_outlive_their_sessions() -> None:
    manager, metrics = KVManager(epoch=1), KVManagerMetrics()
    for _ in range(2):
        session = manager.attach(spec("one", 1, 8, "model"))
        metrics.on_attach(session)
        metrics.on_disconnect(session)
    metrics.on_lease_expired(session)
    metrics.on_detach(session)
    names = ("quire_kv_attaches_total", "quire_kv_broken_streams_total", "quire_kv_expired_leases_total")
    assert [shown(metrics).values(name, "model_name") for name in names] == [{"model": 2}, {"model": 2}, {"model": 1}]


def test_series_of_block_lifetimes_start_and_end_with_a_session() -> None:
    manager, metrics = KVManager(epoch=1), KVManagerMetrics(sample=1)
    names = [f"quire_kv_block_{name}_seconds_count" for name in ("lifetime", "idle_before_evict", "reuse_gap")]

    def counts() -> list[dict[str, float]]:
        return [shown(metrics).values(name, "engine") for name in names]

    for incarnation in (1, 2):
        session = manager.attach(PoolSpec("one", incarnation, "fingerprint", 2, 3, model="model"))
        metrics.on_attach(session)
        assert counts() == [{"one": 0}] * 3
        for number in range(1, 5):
            prompt = Allocate(number, number, "r", b"", [1, 1, number], 3)
            metrics.on_step(session, manager.apply(session, Step(2 * number, allocates=[prompt])), 0.01)
            commit = [Commit(number, 0, [1, 1])] if number == 1 else []
            step = Step(2 * number + 1, commits=commit, frees=[Free(number, FreeReason.FINISHED)])
            metrics.on_step(session, manager.apply(session, step), 0.01)
        # Three blocks: one is hit three times, the others are granted in turn, four times in all.
        assert counts() == [{"one": 2}, {"one": 2}, {"one": 2}]
    metrics.on_detach(session)
    assert counts() == [{}] * 3


def test_no_lifetimes_are_followed_without_a_sample() -> None:
    manager, metrics = KVManager(epoch=1), KVManagerMetrics(sample=0)
    session = manager.attach(spec("one", 1, 8, "model"))
    metrics.on_attach(session)
    step = Step(1, allocates=[Allocate(1, 1, "r", b"", [1], 1)])
    metrics.on_step(session, manager.apply(session, step), 0.01)
    assert not shown(metrics).has("quire_kv_block_lifetime_seconds_count")
