"""Blocks and seals whose bits have flipped: what a running Quire answers, counts, logs and explains."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from quire.v1 import kvmanager_pb2
from services.engine.metrics import REASONS
from tests.faulty_memory import FaultyMemory
from tests.running_quire import CALL_SECONDS, RunningQuire, start_quire
from tests.scrape import Scrape
from tests.services.faults.test_kept_blocks import PROMPT, WHOLE, engine_metrics, kill_engine, request


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], Path], folder: Path) -> Iterator[RunningQuire]:
    options = ("--device-blocks", "64", "--dtype", "float32", "--keep-blocks", f"{folder}/kept", "--verify-blocks", "1")
    one = start_quire("--model", str(tiny_model("llama")), *options)
    yield one
    assert one.close() == 0


def scrape(served: RunningQuire) -> Scrape:
    return Scrape.of(engine_metrics(served))


def test_before_anything_is_wrong_each_reason_has_a_value(served: RunningQuire) -> None:
    shown = scrape(served)
    assert shown.values("quire_kv_wrong_blocks_total", "reason") == dict.fromkeys(REASONS, 0)
    assert shown.values("quire_kv_compared_blocks_total", "reason").keys() == {*REASONS} - {"copy"}
    assert shown.value("quire_kept_seals_broken") == 0


def test_blocks_with_a_flipped_bit_are_computed_again_counted_and_logged(served: RunningQuire, folder: Path) -> None:
    first = served.generate(request())
    before = scrape(served)
    flipped = FaultyMemory(folder / "kept").flip_blocks()
    assert len(flipped) >= WHOLE // 16
    seen = len(served.output.lines)
    again = served.generate(request())
    assert again.token_ids == first.token_ids
    line = served.output.wait_for("whose contents are wrong", CALL_SECONDS, seen)
    assert "condemned 12 blocks of kind all from the device, whose contents are wrong (hit): " in line
    after = scrape(served)
    assert after.values("quire_kv_wrong_blocks_total", "reason") == {**dict.fromkeys(REASONS, 0), "hit": 12}
    compared = [now.value("quire_kv_compared_blocks_total", reason="hit") for now in (before, after)]
    assert compared[1] - compared[0] == 12
    assert after.value("quire_kv_checksum_seconds_total") > before.value("quire_kv_checksum_seconds_total") > 0
    asked = kvmanager_pb2.ExplainRequest(request_id=again.started.request_id)
    assert "condemned" in served.kvmanager.Explain(asked, timeout=CALL_SECONDS).summary


def test_blocks_that_flipped_while_no_engine_ran_are_found_at_the_first_hit(served: RunningQuire, folder: Path) -> None:
    prompt = [*PROMPT[:64], *PROMPT]
    first = served.generate(request(prompt))
    kill_engine(served)
    FaultyMemory(folder / "kept").flip_blocks()
    seen = len(served.output.lines)
    again = served.generate(request(prompt))
    assert again.token_ids == first.token_ids
    assert " (adoption): " in served.output.wait_for("whose contents are wrong", CALL_SECONDS, seen)
    assert scrape(served).value("quire_kv_wrong_blocks_total", reason="adoption") > 0


def test_seals_with_a_flipped_bit_are_counted_and_their_blocks_lost(served: RunningQuire, folder: Path) -> None:
    first = served.generate(request())
    broken = FaultyMemory(folder / "kept").flip_seals()
    seen = len(served.output.lines)
    kill_engine(served)
    assert scrape(served).value("quire_kept_seals_broken") == len(broken) > 0
    assert served.output.wait_for(
        f"broken seals: {len(broken)}; their blocks will be computed again", CALL_SECONDS, seen
    )
    again = served.generate(request())
    assert again.started.cached_tokens == 0
    assert again.token_ids == first.token_ids
    assert psutil.pid_exists(served.children()["engine"])
