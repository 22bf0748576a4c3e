"""What the sweep's best change: as committed, then with them, in the same process. No source is edited."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes
from bench.gpu_check.parts import copies, decode, prefill
from bench.gpu_check.run import RESULTS_VARIABLE
from engine.triton_kernels import tuning
from engine.triton_kernels.tuning import Tiling

HEAD_SIZE = 128  # of all measured parts


class Winner(NamedTuple):
    """The committed candidate of one table of the sweep, and the fastest."""

    committed: tuple[int, ...]
    fastest: tuple[int, ...]

    @property
    def changes(self) -> bool:
        """Whether another one than the committed one is fastest."""
        return self.committed != self.fastest


@dataclass(frozen=True)
class TuningsSizes:
    """The sizes of the parts; `unchanged`: measure also those that the sweep does not change."""

    decode: decode.DecodeSizes
    prefill: prefill.PrefillSizes
    copies: copies.CopySizes
    unchanged: bool


FULL = TuningsSizes(decode.FULL, prefill.FULL, copies.FULL, unchanged=False)
SMALL = TuningsSizes(
    replace(decode.SMALL, others=(), short=()), prefill.SMALL, replace(copies.SMALL, steps=1), unchanged=True
)


def measure(sizes: TuningsSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Measure the parts that change, each with its share of the time."""
    found = winners(_swept())
    notes.raw("tunings", {name: winner._asdict() for name, winner in found.items()})
    runs: dict[str, Callable[[Notes, Deadline], None]] = {
        "prefill": lambda own, until: prefill.attention(sizes.prefill, device, own, until),
        "decode": lambda own, _: decode.attention(sizes.decode, device, own),
        "swap": lambda own, until: copies.measure(sizes.copies, device, own, until),
    }
    chosen = [name for name in runs if changes(name, found) or sizes.unchanged]
    for place, name in enumerate(chosen):
        if deadline.passed():
            return
        until = deadline.part(1 / (len(chosen) - place))
        with notes.kept(f"{name}, as committed"):
            runs[name](notes.suffixed("_as_committed"), until.part(0.5))
        with notes.kept(f"{name}, tuned"), applied(found, device):
            runs[name](notes.suffixed("_tuned"), until)


def winners(swept: dict[str, list[list[float]]]) -> dict[str, Winner]:
    """Return the fastest candidates by table. Each trial is a candidate's numbers and its seconds, committed first."""
    found = {}
    for table, trials in swept.items():
        fastest = min(trials, key=lambda trial: trial[-1])
        first, best = (tuple(int(number) for number in trial[:-1]) for trial in (trials[0], fastest))
        found[table] = Winner(first, best)
    return found


def changes(part: str, found: dict[str, Winner]) -> bool:
    """Return whether a part has another tuning with the winners. Decoding has three tables."""
    tables = ("decode", "split", "chunk") if part == "decode" else (part,)
    return any(found[table].changes for table in tables if table in found)


@contextmanager
def applied(found: dict[str, Winner], device: torch.device) -> Iterator[None]:
    """Let backends that are made inside use the winners."""
    tables = tuning.tiles_of(device)
    tiles, before = tables[HEAD_SIZE], (tuning.PROGRAMS_PER_PROCESSOR, tuning.WAVES, tuning.MIN_CHUNK)
    swaps = tuning.SWAP_PROGRAMS
    split = found["chunk"].fastest if "chunk" in found else before
    try:
        tables[HEAD_SIZE] = (_tiling(found.get("decode"), tiles[0]), _tiling(found.get("prefill"), tiles[1]))
        tuning.PROGRAMS_PER_PROCESSOR, tuning.WAVES, tuning.MIN_CHUNK = split
        tuning.SWAP_PROGRAMS = found["swap"].fastest[0] if "swap" in found else swaps
        yield
    finally:
        tables[HEAD_SIZE] = tiles
        tuning.PROGRAMS_PER_PROCESSOR, tuning.WAVES, tuning.MIN_CHUNK = before
        tuning.SWAP_PROGRAMS = swaps


def _tiling(winner: Winner | None, committed: Tiling) -> Tiling:
    return Tiling(*winner.fastest) if winner else committed


def _swept() -> dict[str, list[list[float]]]:
    """Return what the part `sweep` of this run wrote, by table. Raises if it wrote nothing."""
    raw: dict[str, Any] = json.loads(Path(os.environ[RESULTS_VARIABLE]).read_text())["raw"]
    tables = ("decode", "prefill", "split", "chunk", "swap")
    found = {name: raw[f"sweep_{name}_{HEAD_SIZE}"] for name in tables if f"sweep_{name}_{HEAD_SIZE}" in raw}
    assert found, "the sweep has no results"
    return found
