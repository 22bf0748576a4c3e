import pytest

from services.gateway.fleet.lost_engines import LostEngines
from services.runtime.errors import RepeatedEngineLoss


@pytest.fixture
def lost() -> LostEngines:
    return LostEngines()


def test_a_request_is_isolated_after_two_losses_and_given_up_after_an_isolated_one(lost: LostEngines) -> None:
    isolated = []
    for engine_id in ("one", "two"):
        lost.add(engine_id)
        isolated.append(lost.isolated)
    assert isolated == [False, True]
    lost.on_started(isolated=True)
    with pytest.raises(RepeatedEngineLoss, match="3 engines were lost one after the other"):
        lost.add("one")
    assert lost.engine_ids == ["one", "two", "one"]


def test_a_token_resets_the_count(lost: LostEngines) -> None:
    for _ in range(2):
        lost.add("one")
    lost.on_started(isolated=True)
    lost.on_token()
    assert not lost.isolated
    lost.add("two")
    assert not lost.isolated


@pytest.mark.parametrize("begun", [False, True], ids=["still queued", "isolation not supported"])
def test_a_request_is_not_given_up_if_another_may_be_the_cause(lost: LostEngines, begun: bool) -> None:
    for _ in range(5):
        if begun:
            lost.on_started(isolated=False)
        lost.add("one")
        lost.on_released()
    assert lost.isolated


def test_a_drain_during_isolation_does_not_count_for_the_next_loss(lost: LostEngines) -> None:
    for _ in range(2):
        lost.add("one")
    lost.on_started(isolated=True)
    lost.on_released()  # drained
    lost.add("two")
    assert lost.isolated
