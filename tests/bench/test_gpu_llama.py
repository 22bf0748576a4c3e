"""The part `llama` of `make gpu-check` keeps what it measured where profiler or ceilings fail."""

import io
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes, Result
from bench.gpu_check.parts import ceilings, llama
from tests.engine.triton_case import DEVICE


def test_steps_are_timed_without_profiler_and_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise ValueError("the profiler recorded no kernel")

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(llama, "profiled", refused)
    monkeypatch.setattr(ceilings, "device_ceilings", no_memory)
    written, result = io.StringIO(), Result()
    with torch.inference_mode():
        sizes = replace(llama.SMALL, batches=(1,))
        llama.measure(sizes, DEVICE, Notes(written), Deadline(time.monotonic() + 3600))
    for line in io.StringIO(written.getvalue()):
        result.take(line)
    values = {row.metric: row.value for row in result.rows}
    assert result.failures.keys() == {"llama, ceilings", "profile of 1 sequences"}
    for name in ("llama_3_8b_b1", "llama_3_8b_b1_top_p"):
        assert values[f"{name}_milliseconds_per_step"]
        assert values[f"{name}_tokens_per_second"]
        assert values[f"{name}_of_the_roofline"] is values[f"{name}_idle_share"] is None
