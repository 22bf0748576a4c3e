"""Counters of one launch each of prefill, decode, scan and choose, by Nsight Compute.

Run with a descriptor by the part itself, under the tool, the part `counters` with `--launches` only launches.
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.cases import attending, batch_of, blocks_of, queries, triton_backend
from bench.gpu_check.given_logits import WAYS, GivenLogits, known_tokens, logits_of
from bench.gpu_check.llama_engine import device_sampler
from bench.gpu_check.notes import Notes
from bench.gpu_check.tools.children import failures_in, part, printed_by
from bench.gpu_check.tools.reports import last_line, metrics_of, path_of

TOOL = "ncu"
KERNELS = ("_prefill", "_decode", "scan", "choose")
METRICS = {
    "gpu__time_duration.sum": "duration",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "processor_percent",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
    "smsp__inst_executed.sum": "instructions",
    "launch__registers_per_thread": "registers",
}
_LAUNCHES = "--launches"
_SHOWN = 6000


@dataclass(frozen=True)
class CounterSizes:
    """A prompt, a batch of decoding, and the rows and the vocabulary of the sampler."""

    prompt: int
    decoded: tuple[int, ...]
    sampled: tuple[int, int]


FULL = CounterSizes(8192, (1024,) * 256, (256, 128256))
SMALL = CounterSizes(20, (20, 9), (2, 300))


def measure(sizes: CounterSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Launch under the tool, or without it if it is absent, and write its counters."""
    if _LAUNCHES in sys.argv:
        launch(sizes, device)
        return
    tool = path_of(TOOL)
    notes.raw("ncu", tool or "absent")
    if tool is None:
        print(f"{TOOL} is absent: its counters are not measured", flush=True)
    options = [_LAUNCHES, *(["--dry"] if device.type == "cpu" else [])]
    seconds = deadline.left()
    command = [*_command(tool), *part("counters", seconds, *options)]
    printed, status = printed_by(command, seconds, os.environ)
    found = metrics_of(printed)
    notes.raw("counters", {"status": status, "found": found, "printed": printed[-_SHOWN:]})
    for kernel in KERNELS:
        for metric, name in METRICS.items():
            # None where the tool is absent, or its version has other metrics.
            value = found.get(kernel, {}).get(metric)
            notes.row(f"ncu_{kernel.strip('_')}_{name}", value, "ns" if name == "duration" else "1")
    assert status is not None, f"it did not end in {seconds:.0f} s"
    assert status == 0, f"it ended with {status}: {last_line(printed)}"
    assert tool is None or found, f"it printed no counters: {last_line(printed)}"
    assert not failures_in(printed), failures_in(printed)


def launch(sizes: CounterSizes, device: torch.device) -> None:
    """Launch each kernel twice; the tool sees the second launch."""
    runs = _runs(sizes, device)
    for run in runs:
        run()
    with _profiled(device):
        for run in runs:
            run()


def _runs(sizes: CounterSizes, device: torch.device) -> list[Callable[[], object]]:
    decoded = triton_backend(blocks_of(sizes.decoded), 1, device)
    prompted = triton_backend(blocks_of((sizes.prompt,)), 1, device)
    prompt = batch_of((sizes.prompt,), prompted.cache, fed=(sizes.prompt,))
    rows, vocabulary = sizes.sampled
    logits = logits_of(rows, vocabulary, device)
    sampler = GivenLogits(logits, device_sampler(rows, vocabulary, logits.dtype, device))
    known = known_tokens(rows, 8, vocabulary)
    return [
        attending(prompted, queries(sizes.prompt, device), prompt, 1),
        attending(decoded, queries(len(sizes.decoded), device), batch_of(sizes.decoded, decoded.cache), 1),
        lambda: sampler.sample(WAYS["temperature"], known),
        lambda: sampler.sample(WAYS["top_p"], known),
    ]


def _profiled(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "cpu":
        return nullcontext()
    return torch.cuda.profiler.profile()  # pragma: no cover - CUDA


def _command(tool: str | None) -> list[str]:
    kernels = f"regex:^({'|'.join(KERNELS)})$"
    options = [
        *("--csv", "--target-processes", "all", "--profile-from-start", "off", "--clock-control", "none"),
        *("--kernel-name", kernels, "--metrics", ",".join(METRICS)),
    ]
    return [tool, *options] if tool else []
