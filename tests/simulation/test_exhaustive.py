"""The small universe: all orders of what can happen, up to a depth."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvmanager import KVManager
from services.engine.block_client import BlockClient
from simulation.exhaustive import effects
from simulation.exhaustive.search import Counts, Search
from simulation.exhaustive.small_engine import requests_of
from simulation.exhaustive.state import NEWER, OLDER, Bounds, Choice, Kind, Spent, State
from simulation.exhaustive.structure import digest_of
from simulation.exhaustive.world import World
from simulation.invariants.violation import Violation
from simulation.quiet import quiet

REQUESTS = requests_of(max_tokens=1)


def all_states(depth: int, *, faults: int, incarnations: int = 2) -> Counts:
    return Search(Bounds(faults, timers=4, incarnations=incarnations), REQUESTS).run(depth)


def test_all_orders_of_two_incarnations_up_to_depth_10_keep_the_invariants() -> None:
    counts = all_states(10, faults=1)
    assert counts.states > 5_000
    assert counts.merged > counts.states


def test_all_orders_of_one_incarnation_with_a_fault_keep_the_invariants_until_nothing_is_left_to_happen() -> None:
    counts = all_states(1000, faults=1, incarnations=1)
    assert counts.unexpanded == 0
    assert counts.resting > 100


def test_two_orders_of_independent_choices_lead_to_one_state() -> None:
    start, turn, call = Choice(Kind.START, NEWER), Choice(Kind.TURN, OLDER), first_delivery()
    locals_: dict[bytes, Any] = {}
    states = [state_after([start, *order], locals_) for order in ((turn, call), (call, turn))]
    assert states[0] == states[1]
    assert states[0].key() == states[1].key()
    assert states[0] != state_after([start, turn], locals_)


def first_delivery() -> Choice:
    """The delivery that is possible at the beginning: of the older engine's call."""
    return next(one for one in state_after([], {}).progress() if one.kind is Kind.DELIVER)


def state_after(parts: list[Choice], locals_: dict[bytes, Any]) -> State:
    with quiet():
        world = World(REQUESTS, locals_)
        for part in parts:
            world.make(part)
        state = world.state(Spent())
        world.close()
    return state


def test_states_found_from_known_effects_are_those_of_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "COMPARE_EVERY", 10)
    assert all_states(6, faults=1).compared > 50


def test_an_older_incarnation_that_replaces_the_newer_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVManager, "check_latest", lambda *_: None)
    with pytest.raises(Violation, match="incarnation 1 attached while 2, which is newer") as found:
        all_states(6, faults=0)
    assert "the newer engine starts" in str(found.value)


def test_an_answer_that_does_not_wake_the_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockClient, "_put", lambda client, incoming: client._incoming.append(incoming))
    with pytest.raises(Violation, match="sleeps, but an answer of its KV manager has arrived"):
        all_states(6, faults=0)


def test_equal_objects_have_equal_digests_and_shared_ones_others() -> None:
    first, second = [[1], [1]], [[1], [1]]
    shared = [first[0], first[0]]
    assert digest_of(first) == digest_of(second)
    assert digest_of(first) != digest_of(shared)


def test_a_cycle_has_a_digest() -> None:
    one: list[Any] = []
    one.append(one)
    assert digest_of(one) != digest_of([[]])


def test_the_digest_of_a_coroutine_has_its_position_and_its_stack() -> None:
    async def wait(values: list[int]) -> None:
        for _ in values:
            await turn()

    digests = set[bytes]()
    for turns in (1, 2):
        coroutine = wait([1, 2, 3])
        for _ in range(turns):
            coroutine.send(None)
        digests.add(digest_of(coroutine))
        coroutine.close()
    assert len(digests) == 2


class turn:  # noqa: N801 - awaited like a function
    def __await__(self) -> Iterator[None]:
        yield


def test_an_object_that_may_hide_state_has_no_digest() -> None:
    with pytest.raises(TypeError, match="cannot be written"):
        digest_of(object.__init__)
