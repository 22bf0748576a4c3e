"""Ranks record their steps together or not at all, and none waits for one that failed."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from engine.errors import EngineBroken, RankFailed
from services.engine.ranks.recording import recorded_by_all, recorded_or_launched
from services.engine.startup.backends import NotRecorded

Record = Callable[[], Any]


def together(*ranks: tuple[Record, int]) -> list[Any]:
    """Record on all ranks at the same time, each with its number of collectives; return the results, or the errors."""
    store = HashStore()

    def run(rank: int, record: Record, collectives: int) -> Any:
        try:
            seen: Any = SimpleNamespace(rank=rank, size=len(ranks), collectives=collectives)
            return recorded_by_all(record, seen, store)
        except (EngineBroken, NotRecorded) as failure:
            return str(failure)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(run, range(len(ranks)), *zip(*ranks, strict=True)))


def fails(fault: str, error: type[Exception] = NotRecorded) -> Record:
    def record() -> None:
        raise error(fault)

    return record


def test_steps_that_all_ranks_record_are_replayed() -> None:
    assert together((lambda: "a", 7), (lambda: "b", 7)) == ["a", "b"]


def test_steps_that_no_rank_records_are_launched_by_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quire.engine"):
        assert together((fails("no graphs"), 7), (fails("capturing", RankFailed), 7)) == ["no graphs", "capturing"]
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    assert sorted(record.message for record in caplog.records) == [
        "decoding steps cannot be recorded: capturing",
        "decoding steps cannot be recorded: no graphs",
    ]


def test_a_rank_keeps_its_launched_steps_and_the_reason_if_none_are_recorded() -> None:
    alone: Any = SimpleNamespace(rank=0, size=1, collectives=7)
    launched: Any = object()
    assert recorded_or_launched(fails("no memory"), launched, alone, HashStore()) == (
        launched,
        {"decoding": "no memory"},
    )
    assert recorded_or_launched(lambda: "a", launched, alone, HashStore()) == ("a", {"decoding": ""})


def test_a_rank_that_alone_cannot_record_ends_the_start_of_all_with_its_reason() -> None:
    found = together((lambda: "a", 9), (fails("no memory"), 7), (lambda: "c", 9))
    assert found == ["decoding steps cannot be recorded on rank 1: no memory"] * 3


def test_ranks_that_fail_at_different_places_do_not_go_on() -> None:
    assert together((fails("no memory"), 7), (fails("capturing"), 9)) == [
        "decoding steps cannot be recorded on rank 0: no memory",
        "decoding steps cannot be recorded on rank 1: capturing",
    ]


def test_a_rank_that_cannot_record_does_not_wait_for_those_that_wait_for_it() -> None:
    alone: Any = SimpleNamespace(rank=1, size=2, collectives=7)
    with pytest.raises(EngineBroken, match=r"^decoding steps cannot be recorded on rank 1: no memory$") as failed:
        recorded_by_all(fails("no memory"), alone, HashStore(), seconds=0.1)
    assert not isinstance(failed.value, RankFailed), "rank 0 receives it as a cause, not as a consequence"


def test_a_collective_that_fails_with_another_rank_is_no_fault_of_the_recording() -> None:
    alone: Any = SimpleNamespace(rank=0, size=2, collectives=7)
    with pytest.raises(RankFailed, match=r"^Connection closed by peer$"):
        recorded_by_all(fails("Connection closed by peer", RankFailed), alone, HashStore(), seconds=0.1)
