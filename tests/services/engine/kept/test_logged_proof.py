"""Wrong blocks are in the log, and their number of lines is bounded."""

from collections.abc import Sequence
from typing import Any

import pytest

from blocks import CondemnReason
from engine.schedule.pool.condemnations import WrongBlock
from services.engine.kept.logged_proof import MOST_LINES, LoggedProof


class FixedProof:
    """A proof that finds the same blocks at each check."""

    def __init__(self, *wrong: WrongBlock) -> None:
        self._wrong = list(wrong)
        self.copy_failure = RuntimeError("the device is full")

    def check(self, *_: Any) -> list[WrongBlock]:
        return self._wrong

    differences = check


def lines_of(caplog: pytest.LogCaptureFixture, *wrong: WrongBlock, times: int = 1) -> Sequence[str]:
    proof: Any = FixedProof(*wrong)
    logged = LoggedProof(proof, ("all", "window-64"))
    for _ in range(times):
        assert logged.check([], []) == list(wrong)
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_line_names_reason_kind_tier_and_blocks(caplog: pytest.LogCaptureFixture) -> None:
    wrong = [WrongBlock(0, False, block, CondemnReason.ADOPTION) for block in range(3, 23)]
    other = WrongBlock(1, True, 7, CondemnReason.SWAP_IN)
    assert lines_of(caplog, *wrong, other) == [
        "condemned 20 blocks of kind all from the device, whose contents are wrong (adoption): "
        "3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18 and 4 more",
        "condemned 1 block of kind window-64 from the host, whose contents are wrong (swap_in): 7",
    ]


def test_what_differs_from_a_recomputation_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    proof: Any = FixedProof(WrongBlock(0, False, 3, CondemnReason.RECOMPUTATION))
    hit: Any = None
    LoggedProof(proof, ("all",)).differences(hit, [])
    assert [record.getMessage() for record in caplog.records] == [
        "condemned 1 block of kind all from the device, whose contents are wrong (recomputation): 3"
    ]


def test_why_a_copy_failed_is_logged_with_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    lines_of(caplog, WrongBlock(0, True, 3, CondemnReason.COPY), WrongBlock(0, True, 4, CondemnReason.HIT))
    assert caplog.text.count("RuntimeError: the device is full") == 1


def test_failing_memory_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    wrong = WrongBlock(0, False, 3, CondemnReason.HIT), WrongBlock(0, True, 3, CondemnReason.HOST_HIT)
    lines = lines_of(caplog, *wrong, times=MOST_LINES)
    assert len(lines) == MOST_LINES + 1
    assert lines[-1] == "further wrong blocks are counted, and not logged"


def test_without_wrong_blocks_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog) == []
