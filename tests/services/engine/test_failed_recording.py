"""An engine whose steps cannot be recorded serves launched ones, and says so in its log, its readiness and a metric."""

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.running.unrecorded_engine import MESSAGE
from tests.running_quire import RunningService
from tests.scrape import Scrape

REASON = (
    f"the size 1, number 2 of 2: {MESSAGE} (inputs and logits of decoding steps need 0.00 GiB beside their launches)"
)


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    at = f"unix:{tmp_path_factory.mktemp('sockets')}/kvmanager.sock"
    manager = RunningService("kvmanager", "--listen", at, "--map-listen", "")
    options = ("--model", str(tiny_model("llama")), "--kvmanager", at, "--max-sequences", "2", "--device-blocks", "8")
    listen = ("--listen", "127.0.0.1:0", "--attention-backend", "torch", "--dtype", "float32")
    one = RunningService("engine", "engine", *options, *listen, module="tests.running.unrecorded_engine")
    one.output.wait_for("engine is ready")
    yield one
    assert one.close() == 0
    manager.close()


def test_its_log_has_an_error_with_size_memory_and_cause(engine: RunningService) -> None:
    line = next(line for line in engine.output.lines if "cannot be recorded" in line)
    assert "error" in line.lower()
    assert line.endswith(f"decoding steps cannot be recorded, so each one is launched anew: {REASON}")


def test_it_is_ready_and_says_why_it_is_slow(engine: RunningService) -> None:
    with urlopen(engine.metrics_url.replace("/metrics", "/ready"), timeout=60) as answer:
        assert answer.read().decode() == f"ready\nsteps are launched, not recorded (decoding): {REASON}\n"


def test_a_metric_counts_it(engine: RunningService) -> None:
    assert Scrape.of(engine.metrics_url).values("quire_recording_failed", "steps") == {"decoding": 1}
