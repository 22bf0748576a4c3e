"""Launches that are repeated for other layers pass what Triton's own launches pass, in less time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.attention.backend import PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from services.models.model_store import default_cache
from tests.engine.triton_case import DEVICE, make_triton_backend

pytest.importorskip("triton")
from engine.triton_kernels.repeated import _class_of

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def check_repeated(packages: Path | None = None) -> None:
    """Compare repeated launches with new ones; `packages` come before those that are installed."""
    paths = os.pathsep.join(str(path) for path in (packages, ROOT) if path)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    environment["TRITON_CACHE_DIR"] = str(default_cache().parent / "triton")
    command = [sys.executable, "-m", "tests.engine.repeated_launches"]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if "ptxas" in ended.stderr and "not found" in ended.stderr:
        pytest.skip("this Triton has no assembler for GPUs")
    assert ended.returncode == 0, ended.stderr
    found, anew, repeated = ended.stdout.splitlines()
    assert found == "same 4", "one of decoding and one of the prompt, in each of two layers"
    assert float(repeated) < float(anew) / 2


def test_layers_that_repeat_launches_launch_what_they_would_launch_anew() -> None:
    check_repeated()


@pytest.mark.parametrize(
    ("one", "other"), [(16, 17), (17, 1), (16, 2**32), (None, 0), (torch.zeros(8), torch.zeros(8).half())]
)
def test_arguments_that_triton_compiles_differently_are_of_other_classes(one: object, other: object) -> None:
    assert _class_of(one) != _class_of(other)  # type: ignore[arg-type]


def test_tensors_that_begin_elsewhere_in_16_bytes_are_of_other_classes() -> None:
    numbers = torch.zeros(8)
    assert _class_of(numbers) != _class_of(numbers[1:])
    assert _class_of(numbers) == _class_of(numbers[4:])


def test_layers_of_a_batch_may_differ_in_queries_scoring_and_sinks() -> None:
    torch.manual_seed(0)
    backend = make_triton_backend()(CacheGeometry.uniform(4, 2, 16), 16, 12, torch.float32)
    backend.cache.normal_()
    work = [Work(1, (0,), 20, (1, 2), True, Sampling()), Work(2, (0,) * 9, 0, (3,), True, Sampling())]
    batch = PagedBatch.of(work, 16, DEVICE)
    sinks = torch.randn(4, device=DEVICE)
    scorings = [Scoring(0.25), Scoring(0.5), Scoring(0.25, window=7), Scoring(0.25, sinks=sinks), Scoring(0.25)]
    layers = [0, 1, 2, 3, 3]
    queries = [torch.randn(10, 4, 16, device=DEVICE) for _ in layers]
    found = [backend.attend(*one, batch, scoring) for *one, scoring in zip(layers, queries, scorings, strict=True)]
    for layer, query, scoring, result in zip(layers, queries, scorings, found, strict=True):
        alone = PagedBatch.of(work, 16, DEVICE)
        assert torch.equal(backend.attend(layer, query, alone, scoring), result)
