"""Versions, and the ceilings of the device that other figures are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
import triton

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.ceilings import multiplying, reading
from bench.gpu_check.notes import Notes
from bench.gpu_check.timing import Run, recorded, take_turns
from services.loadgen.report import machine

_PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "pytest")
# What nvidia-smi reports of a card: the clocks and the power limit explain figures below the specification.
_CARD = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "ecc.mode.current")


@dataclass(frozen=True)
class CeilingSizes:
    """Bytes that are read and copied on the device, bytes copied to and from the host, and the size of matrices."""

    memory: int
    host: int
    matrix: int
    repetitions: int


FULL = CeilingSizes(4 << 30, 1 << 28, 8192, 10)
SMALL = CeilingSizes(1 << 16, 1 << 12, 64, 1)


def measure(sizes: CeilingSizes, device: torch.device, notes: Notes, _: Deadline) -> None:
    """Write versions first, then the ceilings."""
    notes.raw("versions", versions(device))
    runs, amounts = _runs(sizes, device)
    seconds = take_turns(runs, sizes.repetitions, device, "ceilings")
    notes.raw("ceilings", seconds)
    found = rates(amounts, {name: median(values) for name, values in seconds.items()})
    notes.row("read_bandwidth", round(found["read"] / 1e9, 1), "GB/s")
    notes.row("copy_bandwidth", round(found["copy"] / 1e9, 1), "GB/s")
    notes.row("host_to_device_bandwidth", round(found["to_device"] / 1e9, 1), "GB/s")
    notes.row("device_to_host_bandwidth", round(found["to_host"] / 1e9, 1), "GB/s")
    notes.row("products", round(found["products"] / 1e12, 1), "TFLOP/s")


def device_ceilings(sizes: CeilingSizes, device: torch.device) -> dict[str, float]:
    """Return bytes read and operations of matrix products, per second, as measured now."""
    runs, amounts = _runs(sizes, device)
    chosen = {name: runs[name] for name in ("read", "products")}
    seconds = take_turns(chosen, sizes.repetitions, device, "ceilings")
    return rates(amounts, {name: median(values) for name, values in seconds.items()})


def rates(amounts: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the amounts per second."""
    return {name: amounts[name] / spent for name, spent in seconds.items()}


def _runs(sizes: CeilingSizes, device: torch.device) -> tuple[dict[str, Run], dict[str, float]]:
    """Return the functions to time, and what each moves or computes."""
    memory = torch.ones(sizes.memory, dtype=torch.uint8, device=device)
    first, second = memory.view(2, -1)
    host = torch.ones(sizes.host, dtype=torch.uint8, pin_memory=device.type == "cuda")
    part = memory[: sizes.host]
    # Recorded, as what is compared with them: a launch by the host takes up to 3 % of their time.
    runs: dict[str, Run] = {
        "read": recorded(reading(memory), device),
        "copy": recorded(lambda: first.copy_(second), device),
        "to_device": lambda: part.copy_(host, non_blocking=True),
        "to_host": lambda: host.copy_(part, non_blocking=True),
        "products": recorded(multiplying(sizes.matrix, device), device),
    }
    # A copy reads and writes.
    amounts = {"read": sizes.memory, "copy": sizes.memory, "to_device": sizes.host, "to_host": sizes.host}
    return runs, {name: float(one) for name, one in amounts.items()} | {"products": 2.0 * sizes.matrix**3}


def versions(device: torch.device) -> dict[str, object]:
    """Return the versions of packages and libraries, and what nvidia-smi reports of the card."""
    card = machine.output_of(["nvidia-smi", f"--query-gpu={','.join(_CARD)}", "--format=csv,noheader"])
    return {
        **machine.versions(_PACKAGES),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "triton_file": triton.__file__,
        "device": str(device),
        "card": dict(zip(_CARD, (card or "").split(", "), strict=False)),
    }
