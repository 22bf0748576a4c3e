"""A sandbox operates the real core; its log explains each operation."""

import asyncio
from typing import Any

import pytest

from services.kvmanager.pages.playground import sandbox, sandboxes
from services.kvmanager.pages.playground.operations import OPERATION
from services.kvmanager.pages.playground.sandbox import Sandbox
from services.kvmanager.pages.playground.sandbox_view import sandbox_json
from services.kvmanager.pages.playground.sandboxes import Sandboxes, UnknownSandbox
from services.runtime.slices import run_in_slices


@pytest.fixture
def box() -> Sandbox:
    return Sandbox(4)


def run(box: Sandbox, operation: str, **fields: Any) -> str:
    """Run an operation; return what it added to the log."""
    before = len(box.log.lines)
    box.operate(OPERATION.validate_python({"operation": operation, **fields}))
    return " ".join(line.text for line in box.log.lines[before:])


def tables(box: Sandbox) -> dict[int, list[int]]:
    return {one["sequence"]: one["table"] for one in sandbox_json(box)["sequences"]}


def block(box: Sandbox, number: int) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = sandbox_json(box)["blocks"]
    return blocks[number - 1]


def test_blocks_are_granted_as_a_sequence_grows(box: Sandbox) -> None:
    assert run(box, "new", tokens=7) == "Sequence 1 began with 7 tokens in blocks 1-2."
    assert run(box, "append", sequence=1) == "Sequence 1 grew by 1 token, which fit into block 2."
    assert run(box, "append", sequence=1, tokens=5) == "Sequence 1 grew by 5 tokens; blocks 3-4 were granted."
    assert tables(box) == {1: [1, 2, 3, 4]}
    assert block(box, 4) == {"block": 4, "state": "held", "count": 1, "keyed": False, "fill": 1, "holders": [1]}


def test_a_write_to_a_shared_block_copies_it_first(box: Sandbox) -> None:
    run(box, "new", tokens=6)
    forked = "Sequence 2 was forked from 1: both share blocks 1-2, now with reference count 2; no block was copied."
    assert run(box, "fork", sequence=1) == forked
    copied = "Sequence 2 rewrote its last token; block 2 is shared with sequence 1 and was copied to block 3."
    assert run(box, "write", sequence=2) == copied
    assert tables(box) == {1: [1, 2], 2: [1, 3]}
    assert run(box, "write", sequence=1).endswith("in place, because block 2 has no other holder.")
    run(box, "fork", sequence=2)
    forks = run(box, "fork", sequence=2)
    assert "now with reference counts 3 to 4" in forks
    grown = "Sequence 2 grew by 3 tokens; block 3 is shared with sequences 3 and 4 and was copied to block 4; "
    assert run(box, "append", sequence=2, tokens=3) == f"{grown}block 5 was granted."


def test_a_write_to_a_committed_block_copies_it_unless_it_is_its_only_token(box: Sandbox) -> None:
    run(box, "new", tokens=4)
    copied = "Sequence 1 rewrote its last token; block 1 is in the prefix cache and was copied to block 2."
    assert run(box, "write", sequence=1) == copied
    run(box, "new", tokens=5)
    run(box, "fork", sequence=2)
    only = "Sequence 3 rewrote its last token, the only one in block 4, so no copy was needed: block 5 was granted."
    assert run(box, "write", sequence=3) == only


def test_freed_blocks_stay_cached_and_are_shared_by_a_text_with_the_same_beginning(box: Sandbox) -> None:
    run(box, "new", text="one two three four five")
    run(box, "fork", sequence=1)
    assert run(box, "free", sequence=2) == "Sequence 2 was freed: blocks 1-2 are still held by other sequences."
    assert run(box, "free", sequence=1) == "Sequence 1 was freed: block 1 is cached and block 2 is free."
    assert (block(box, 1)["state"], block(box, 1)["fill"], block(box, 2)["fill"]) == ("cached", 4, 0)
    shared = "Sequence 3 began with 6 tokens: its prefix was cached in block 1, which was shared, block 3 was granted."
    assert run(box, "new", text="one two three four six seven") == shared
    assert sandbox_json(box)["sequences"][0]["words"] == ["one", "two", "three", "four", "six", "seven"]


def test_cached_blocks_are_evicted_when_no_free_block_is_left(box: Sandbox) -> None:
    for number in range(1, 5):
        run(box, "new", tokens=64)
        run(box, "free", sequence=number)
    assert (
        run(box, "new", tokens=8)
        == "Sequence 5 began with 8 tokens in blocks 16 and 15. Blocks 16 and 15 were evicted."
    )


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        ({"operation": "append", "sequence": 9}, "sequence 9 does not exist"),
        ({"operation": "new"}, "give either a number of tokens or a text"),
        ({"operation": "new", "tokens": 1, "text": "a"}, "give either a number of tokens or a text"),
        ({"operation": "new", "tokens": 81}, "a sequence must have at most 80 tokens, not 81"),
        ({"operation": "new", "tokens": 9, "final": 8}, "the final length must be between 9 and 80 tokens, not 8"),
        ({"operation": "write", "sequence": 1}, "sequence 1 has only one token and would be empty without it: free it"),
        ({"operation": "append", "sequence": 1, "tokens": 80}, "a sequence must have at most 80 tokens, not 81"),
    ],
)
def test_a_refused_operation_changes_nothing(box: Sandbox, operation: dict[str, Any], reason: str) -> None:
    run(box, "new", tokens=1)
    before = sandbox_json(box)
    assert f"Refused: {reason}" in run(box, **operation)
    after = sandbox_json(box)
    assert after["log"].pop()["refused"]
    assert after == before


def test_a_full_pool_and_too_many_sequences_are_refused(box: Sandbox) -> None:
    for _ in range(3):
        run(box, "new", tokens=80)
    assert run(box, "new", tokens=20) == "Refused: 5 blocks are needed, 4 are available."
    run(box, "new", tokens=16)
    run(box, "fork", sequence=5)
    assert run(box, "write", sequence=5) == "Refused: block 64 must be copied, but no block is available."
    for _ in range(43):
        run(box, "fork", sequence=1)
    assert run(box, "fork", sequence=1) == "Refused: there are already 48 sequences, which is the maximum."


def test_undo_replays_all_operations_but_the_last(box: Sandbox) -> None:
    run(box, "new", tokens=6)
    run(box, "fork", sequence=1)
    before = sandbox_json(box)
    run(box, "free", sequence=1)
    assert sandbox_json(asyncio.run(run_in_slices(box.undone()))) == before


def test_a_sandbox_has_a_maximum_of_operations(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_MAX_OPERATIONS", 1)
    run(box, "new", tokens=1)
    assert run(box, "new", tokens=1).startswith("The sandbox has reached its maximum of 1 operations.")
    assert list(tables(box)) == [1]


def test_idle_and_surplus_sandboxes_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "_MAX_SANDBOXES", 2)
    seconds = [0.0]
    kept = Sandboxes(lambda: seconds[0])
    first, second = kept.create(4), kept.create(16)
    box = kept.get(first)
    third = kept.create(4)
    assert kept.get(first) is box, "the least recently used one is removed"
    with pytest.raises(UnknownSandbox):
        kept.get(second)
    seconds[0] = 1000.0
    kept.replace(first, other := Sandbox(4))
    kept.replace("unknown", other)
    seconds[0] = 2000.0
    assert kept.get(first) is other
    for name in (third, "unknown"):
        with pytest.raises(UnknownSandbox):
            kept.get(name)


def test_the_beam_example_returns_to_its_start(box: Sandbox) -> None:
    stages = sandbox_json(box)["beam"]["stages"]
    texts = [run(box, "beam") for _ in range(stages)]
    assert all(texts)
    assert any("was pruned" in text for text in texts)
    assert not any("Refused" in text for text in texts)
