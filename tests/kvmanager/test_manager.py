import re
from dataclasses import replace

import pytest

from blocks import Commit, Extend, Fork, Free, FreeReason, Step, StepRefusal, WindowKind
from kvmanager import (
    InvalidRegistration,
    KVManager,
    PoolSpec,
    SessionReplaced,
    StaleIncarnation,
    StepOutOfOrder,
    UnknownPool,
)
from tests.kvmanager.tiny_pools import allocate


@pytest.fixture
def manager():
    return KVManager(epoch=7)


def spec(engine_id="engine-a", incarnation=1, device_blocks=8):
    return PoolSpec(engine_id, incarnation, "model", block_size=2, device_blocks=device_blocks)


def test_each_engine_has_its_own_pool(manager):
    a, b = manager.attach(spec("a")), manager.attach(spec("b", device_blocks=3))
    manager.apply(a, Step(1, allocates=[allocate(1, [5, 6, 7])]))
    assert a.pool.device.counts.held == 2
    assert b.pool.device.counts == (3, 0, 0, 0)


def test_session_numbers_increase(manager):
    numbers = [manager.attach(spec(engine_id)).number for engine_id in ("a", "b", "a", "b")]
    assert numbers == sorted(set(numbers))


def test_a_newer_session_starts_with_an_empty_pool(manager):
    older = manager.attach(spec())
    manager.apply(older, Step(5, allocates=[allocate(1, [5, 6])]))
    newer = manager.attach(spec())
    assert newer.pool.device.counts == (8, 0, 0, 0)
    assert manager.apply(newer, Step(1, allocates=[allocate(1, [5, 6])])).result.refusals == ()


def test_steps_of_a_replaced_session_are_refused_and_change_nothing(manager, state_of):
    older = manager.attach(spec())
    newer = manager.attach(spec())
    before = state_of(older), state_of(newer)
    with pytest.raises(SessionReplaced):
        manager.apply(older, Step(1, allocates=[allocate(1, [5, 6])]))
    assert (state_of(older), state_of(newer)) == before


def test_an_older_incarnation_is_refused_and_the_attached_one_continues(manager):
    session = manager.attach(spec(incarnation=20))
    with pytest.raises(StaleIncarnation):
        manager.attach(spec(incarnation=19))
    assert manager.session("engine-a") is session
    assert manager.apply(session, Step(1, allocates=[allocate(1, [5])])).result.refusals == ()


def test_an_older_incarnation_is_refused_while_any_newer_one_is_attaching(manager):
    first = manager.register(spec(incarnation=20))
    latest = manager.register(spec(incarnation=21))
    manager.unregister(latest)
    with pytest.raises(StaleIncarnation):
        manager.register(spec(incarnation=19))
    assert manager.attach(spec(incarnation=20), registration=first).pool.spec.incarnation == 20


def test_an_attach_that_began_before_the_session_does_not_extend_its_lease(manager):
    abandoned = manager.register(spec(incarnation=20))
    session = manager.attach(spec(incarnation=20))
    assert not manager.is_attaching(session)
    with pytest.raises(SessionReplaced):
        manager.check_latest(abandoned)
    manager.register(spec(incarnation=20))
    assert manager.is_attaching(session)


@pytest.mark.parametrize("incarnation", [20, 21])
def test_the_same_or_a_newer_incarnation_takes_over(manager, incarnation):
    older = manager.attach(spec(incarnation=20))
    newer = manager.attach(spec(incarnation=incarnation))
    assert manager.session("engine-a") is newer
    with pytest.raises(SessionReplaced):
        manager.apply(older, Step(1))


def test_processes_of_one_boot_are_ordered_by_its_clock(manager):
    # The clock of incarnations was set back between the starts of the two.
    def started(incarnation, seconds, boot_id="boot"):
        return replace(spec(incarnation=incarnation), boot_id=boot_id, started_after_boot=seconds)

    manager.attach(started(20, 100))
    newer = manager.attach(started(10, 200))
    assert manager.session("engine-a") is newer
    with pytest.raises(StaleIncarnation):
        manager.attach(started(20, 100))
    with pytest.raises(StaleIncarnation):
        manager.attach(started(9, 300, "another boot"))
    assert manager.attach(started(11, 50, "another boot")).pool.spec.incarnation == 11


def test_one_incarnation_never_precedes_itself(manager):
    manager.attach(replace(spec(incarnation=20), boot_id="boot", started_after_boot=100))
    assert manager.attach(spec(incarnation=20)).pool.spec.incarnation == 20


def test_an_older_incarnation_of_another_engine_is_accepted(manager):
    manager.attach(spec("a", incarnation=20))
    assert manager.attach(spec("b", incarnation=3)).pool.spec.incarnation == 3


@pytest.mark.parametrize("detaches", [1, 2])
def test_detach_drops_the_pool_and_later_steps_are_refused(manager, detaches):
    session = manager.attach(spec())
    for _ in range(detaches):
        manager.detach(session)
    assert manager.sessions() == []
    with pytest.raises(SessionReplaced):
        manager.apply(session, Step(1))


def test_after_a_detach_any_incarnation_may_attach(manager):
    manager.detach(manager.attach(spec(incarnation=20)))
    assert manager.attach(spec(incarnation=1)).pool.spec.incarnation == 1


def test_detaching_a_replaced_session_drops_nothing(manager):
    older = manager.attach(spec())
    newer = manager.attach(spec())
    manager.detach(older)
    assert manager.session("engine-a") is newer
    assert manager.apply(newer, Step(1)).device == (8, 0, 0, 0)


def test_sessions_are_listed_by_engine_id(manager):
    for engine_id in ("b", "c", "a"):
        manager.attach(spec(engine_id))
    assert [session.pool.spec.engine_id for session in manager.sessions()] == ["a", "b", "c"]


def test_an_empty_id_means_the_only_engine(manager):
    session = manager.attach(spec())
    assert manager.session("") is session


@pytest.mark.parametrize(("attached", "requested"), [([], ""), ([], "a"), (["a", "b"], ""), (["a", "b"], "c")])
def test_an_engine_that_is_not_attached_is_unknown_and_the_attached_are_named(manager, attached, requested):
    for engine_id in attached:
        manager.attach(spec(engine_id))
    with pytest.raises(UnknownPool, match=", ".join(attached) or "none"):
        manager.session(requested)


def test_totals_count_the_effects_of_the_steps(manager):
    session = manager.attach(spec())
    prompt = [1, 2, 3, 4, 5]

    manager.apply(session, Step(1, allocates=[allocate(1, prompt)]))  # blocks 1, 2, 3
    manager.apply(session, Step(2, commits=[Commit(1, 0, prompt[:4])], allocates=[allocate(2, prompt)]))  # 1, 2 and 4
    manager.apply(session, Step(3, forks=[Fork(2, 3, 5)], extends=[Extend(2, [(2, 6), (3, 6)])]))  # copies 4 to 5
    assert (session.totals.steps, session.totals.granted_blocks, session.totals.copied_blocks) == (3, 5, 1)
    assert (session.totals.prefix_query_tokens, session.totals.prefix_hit_tokens) == (10, 4)
    assert (session.totals.peak_held_blocks, session.totals.peak_saved_blocks) == (5, 4)

    frees = [Free(3, FreeReason.PRUNED), Free(2, FreeReason.PREEMPTED), Free(1, FreeReason.FINISHED)]
    manager.apply(session, Step(4, frees=frees))
    manager.apply(session, Step(5, allocates=[allocate(4, list(range(50, 64)))]))  # 7 of 6 free and 2 cached blocks
    assert session.totals.evicted_blocks == 1
    assert (session.totals.preemptions, session.totals.refusals) == (1, {})
    assert (session.totals.peak_held_blocks, session.totals.peak_saved_blocks) == (7, 4)


def test_totals_count_refusals_by_reason_but_not_refused_preemptions(manager):
    session = manager.attach(spec())
    manager.apply(session, Step(1, allocates=[allocate(1, [1]), allocate(1, [1])]))
    frees = [Free(9, FreeReason.PREEMPTED), Free(1, FreeReason.PREEMPTED), Free(1, FreeReason.PREEMPTED)]
    manager.apply(session, Step(2, commits=[Commit(1, 3, [0, 0])], frees=frees))
    reasons = {StepRefusal.ALREADY_EXISTS: 1, StepRefusal.INVALID: 1, StepRefusal.UNKNOWN: 2}
    assert (session.totals.refusals, session.totals.preemptions) == (reasons, 1)


@pytest.mark.parametrize("newer_has_finished", [True, False])
def test_of_two_attaches_of_one_engine_the_last_to_register_is_attached(manager, newer_has_finished):
    older, newer = manager.register(spec()), manager.register(spec())
    live = manager.attach(spec(), registration=newer) if newer_has_finished else None
    with pytest.raises(SessionReplaced):
        manager.check_latest(older)
    with pytest.raises(SessionReplaced):
        manager.attach(spec(), registration=older)
    assert manager.find_session("engine-a") is live


def test_an_attach_continues_when_a_later_one_was_cancelled(manager):
    older, newer = manager.register(spec()), manager.register(spec())
    manager.unregister(newer)
    assert manager.is_live(manager.attach(spec(), registration=older))


def test_a_step_whose_session_is_replaced_between_two_slices_changes_nothing(manager):
    older = manager.attach(spec())
    work = manager.applying(older, Step(1, allocates=[allocate(1, [5, 6]), allocate(2, [7])]), budget=1)
    next(work)
    newer = manager.attach(spec())
    with pytest.raises(SessionReplaced):
        next(work)
    assert newer.pool.device.counts == (8, 0, 0, 0)
    assert newer.totals.steps == 0
    assert [event.item for event in manager.ledger.events(1, 100).events] == [None, None]


def test_a_step_out_of_order_in_slices_leaves_the_session_ready_for_the_next(manager):
    session = manager.attach(spec())
    manager.apply(session, Step(2))
    with pytest.raises(StepOutOfOrder):
        next(manager.applying(session, Step(2), budget=1))
    assert not session.stepping
    assert manager.apply(session, Step(3)).result.step == 3


def test_totals_do_not_count_a_step_out_of_order(manager):
    session = manager.attach(spec())
    manager.apply(session, Step(2))
    with pytest.raises(StepOutOfOrder):
        manager.apply(session, Step(2))
    assert session.totals.steps == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine_id", ""),
        ("incarnation", 0),
        ("block_size", 0),
        ("device_blocks", 0),
        ("device_blocks", -4),
        ("host_blocks", -1),
    ],
)
def test_an_invalid_pool_is_refused_with_the_field_name(field, value):
    good = PoolSpec("a", 1, "model", 1, 1)
    with pytest.raises(InvalidRegistration, match=f"^{field} must") as refused:
        replace(good, **{field: value})
    assert refused.value.field == f"register.{field}"


def window(name="window", tokens=4, device_blocks=2, **rest):
    return WindowKind(name, tokens, device_blocks, **rest)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([window("")], "kinds[0].name must have between 1 and 200 characters, not 0"),
        ([window(), window("x" * 201)], "kinds[1].name must have between 1 and 200 characters, not 201"),
        ([window(), window()], "kinds[1].name must be another than 'window', which is in use"),
        ([window("all")], "kinds[0].name must be another than 'all', which is in use"),
        ([window(), window("b", tokens=0)], "kinds[1].tokens must be between 1 and "),
        ([window(device_blocks=0)], "kinds[0].device_blocks must be between 1 and "),
        ([window(str(number)) for number in range(9)], "kinds must have at most 8 entries, not 9"),
    ],
)
def test_an_invalid_window_kind_is_refused_with_its_place(windows, message):
    with pytest.raises(InvalidRegistration, match=re.escape(message)) as refused:
        PoolSpec("a", 1, "model", 1, 1, windows=tuple(windows))
    assert refused.value.field == f"register.{message.split()[0]}"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (PoolSpec("a", 1, "model", 1, 9), "device_blocks"),
        (PoolSpec("a", 1, "model", 1, 2, 7), "host_blocks"),
        (PoolSpec("a", 1, "model", 1, 2, windows=(window(), window("b", device_blocks=5))), "kinds[1].device_blocks"),
        (PoolSpec("a", 1, "model", 1, 2, windows=(window(host_blocks=8),)), "kinds[0].host_blocks"),
    ],
)
def test_a_pool_of_too_many_blocks_is_refused_with_its_largest_tier(spec, field):
    with pytest.raises(InvalidRegistration, match=re.escape(f"{field} must be less: the pool has")) as refused:
        KVManager(epoch=1, max_blocks=8).attach(spec)
    assert refused.value.field == f"register.{field}"
