"""`quire run-batch` stopped for longer than a gateway waits for an engine, as by Ctrl-Z: its own engine is not lost."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults import wait_until
from tests.running_quire import START_SECONDS
from tests.services.cli.batch.test_run_batch import answers_in, completion, has_answers, start, write

PAUSE_SECONDS = 13
REQUESTS = 3000


def test_a_batch_that_was_paused_loses_no_work(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    requests = write(tmp_path / "requests.jsonl", *(completion(number, ignore_eos=True) for number in range(REQUESTS)))
    output = tmp_path / "answers.jsonl"
    process = start(requests, output, "--model", str(tiny_model("llama")), "--device-blocks", "256")
    wait_until(lambda: process.poll() is not None or has_answers(output), "an answer", START_SECONDS)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    answered = len(answers_in(output))
    os.kill(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=5 * START_SECONDS)
    assert process.returncode == 0, errors
    assert answered < REQUESTS, "it was paused while it ran"
    assert len(answers_in(output)) == REQUESTS
    assert "no message" not in errors
    assert "warning" not in errors.lower()
