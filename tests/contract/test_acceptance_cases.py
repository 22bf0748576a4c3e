"""Cases of docs/kv-acceptance.md about the wire, on the core and over a real stream."""

import pytest

from blocks import Allocate, Step, TableChange
from tests.contract.block_managers import (
    Link,
    Manager,
    answer,
    answers_until_disconnected,
    answers_until_reattached,
    next_answer,
)

BLOCK = 2
BLOCKS = 6


@pytest.fixture
def link(manager: Manager) -> Link:
    return manager.attach(BLOCK, BLOCKS)


def allocate(sequence: int, token_ids: list[int]) -> Allocate:
    return Allocate(sequence, sequence, f"request {sequence}", b"", token_ids, 100, 0)


def test_70_a_retry_while_the_first_attempt_is_in_flight_gets_one_grant(manager: Manager, link: Link) -> None:
    """Break the engine's stream unnoticed by the manager; sent Steps may be in flight."""
    link.blocks.send(Step(1, allocates=[allocate(1, [1, 2, 3])]))
    again = manager.attach(BLOCK, BLOCKS)
    if link.blocks.ready:
        link.blocks.send(Step(2, allocates=[allocate(2, [1, 2, 3])]))
    result = answer(again, Step(3, allocates=[allocate(1, [1, 2, 3])]))
    assert result.tables == (TableChange(1, 0, [1, 2], 4, 0),)
    link.wait_until_broken()  # then it attaches again
    assert list(manager.pool().sequences) == [1]
    assert manager.pool().device.counts.held == 2
    assert answer(again, Step(4)).available_blocks == 4
    answers_until_disconnected(link)


@pytest.mark.parametrize("steps", [1, 5])
def test_79_a_step_applied_but_not_answered_is_granted_once(manager: Manager, link: Link, steps: int) -> None:
    for number in range(1, steps + 1):
        link.blocks.send(Step(number, allocates=[allocate(number, [number])]))
    manager.stop()
    answers = answers_until_disconnected(link)
    answered = len(answers)
    assert [result.step for result in answers] == list(range(1, answered + 1)), "answers must be in order, without gaps"
    manager.start()
    assert answers_until_reattached(link) == ([], BLOCKS - answered)
    missing = [allocate(number, [number]) for number in range(answered + 1, steps + 1)]
    result = answer(link, Step(100, allocates=missing))
    assert result.refusals == ()
    assert sorted(manager.pool().sequences) == list(range(1, steps + 1))
    tables = [sequence.table for sequence in manager.pool().sequences.values()]
    assert sorted(tables) == [[number] for number in range(1, steps + 1)]
    assert result.available_blocks == BLOCKS - steps


def test_74_a_new_incarnation_starts_with_every_block_free(manager: Manager, link: Link) -> None:
    answer(link, Step(1, allocates=[allocate(1, [1, 2, 3, 4, 5])]))
    newer = manager.attach(BLOCK, BLOCKS, incarnation=2)
    assert manager.pool().device.counts == (BLOCKS, 0, 0, 0)
    assert answer(newer, Step(1, allocates=[allocate(9, [1])])).available_blocks == BLOCKS - 1
    link.blocks.send(Step(2, allocates=[allocate(2, [4])]))
    assert answers_until_disconnected(link) == [], "the replaced incarnation is granted nothing"
    assert list(manager.pool().sequences) == [9]
    assert answer(newer, Step(2)).available_blocks == BLOCKS - 1


def test_85_of_two_steps_in_flight_for_the_last_block_one_is_granted_and_one_refused(
    manager: Manager, link: Link
) -> None:
    answer(link, Step(1, allocates=[allocate(1, [1] * 10)]))
    for number in (2, 3):
        link.blocks.send(Step(number, allocates=[allocate(number, [number])]))
    winner, loser = next_answer(link), next_answer(link)
    assert winner.tables == (TableChange(2, 0, [6], 2, 0),)
    assert loser.tables == ()
    assert [refusal.detail for refusal in loser.refusals] == ["1 block is needed, 0 are available"]
    assert manager.pool().violations() == []
    assert answer(link, Step(4)).available_blocks == 0
