"""Engines lost with one request: when the next one gets it isolated, and when it is given up."""

import pytest

from services.gateway.fleet.lost_engines import LostEngines
from services.runtime.errors import RequestGivenUp


@pytest.fixture
def lost() -> LostEngines:
    return LostEngines()


def test_it_is_isolated_after_two_and_given_up_after_one_more_that_computed_it_so(lost: LostEngines) -> None:
    isolated = []
    for engine_id in ("one", "two"):
        lost.add(engine_id)
        isolated.append(lost.isolated)
    assert isolated == [False, True]
    lost.on_started(isolated=True)
    with pytest.raises(RequestGivenUp, match="3 engines were lost one after the other"):
        lost.add("one")
    assert lost.engine_ids == ["one", "two", "one"]


def test_with_a_token_the_count_begins_anew(lost: LostEngines) -> None:
    for _ in range(2):
        lost.add("one")
    lost.on_started(isolated=True)
    lost.on_token()
    assert not lost.isolated
    lost.add("two")
    assert not lost.isolated


@pytest.mark.parametrize("begun", [False, True], ids=["it waited for its turn", "the engine serves no isolation"])
def test_it_is_not_given_up_where_another_one_may_be_to_blame(lost: LostEngines, begun: bool) -> None:
    for _ in range(5):
        if begun:
            lost.on_started(isolated=False)
        lost.add("one")
        lost.on_released()
    assert lost.isolated


def test_an_engine_that_drained_while_it_computed_it_is_not_blamed_for_the_next_loss(lost: LostEngines) -> None:
    for _ in range(2):
        lost.add("one")
    lost.on_started(isolated=True)
    lost.on_released()  # drained
    lost.add("two")
    assert lost.isolated
