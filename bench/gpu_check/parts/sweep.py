"""A sweep of tile shapes: prints the tables of engine/triton_kernels/tuning.py, with the best that were measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any, Generic, TypeVar

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes
from bench.gpu_check.tile_trials import Split, TileTrials
from engine.triton_kernels.tuning import MIN_CHUNK, PROGRAMS_PER_PROCESSOR, TILES, WAVES, Tiling

Candidate = TypeVar("Candidate", Tiling, Split)

# Shares of the time that is left: for a head size but the last, for its tiles, and of these for decoding.
_OWN, _TILES, _DECODING = 0.65, 0.85, 0.5


@dataclass(frozen=True)
class SweepSizes:
    """Head sizes in the order of their sweep; batches of decoding, a prompt, and the candidates, likeliest first."""

    head_sizes: Sequence[int]
    batches: Sequence[Sequence[int]]
    prompt: int
    decode: Sequence[Tiling]
    prefill: Sequence[Tiling]
    splits: Sequence[Split]
    repetitions: int


FULL = SweepSizes(
    head_sizes=(128, 64),
    batches=((1024,) * 256, (32768, *(8192,) * 4, *(2048,) * 32, *(512,) * 128)),
    prompt=8192,
    decode=[Tiling(16, *rest) for rest in product((64, 128, 32), (4, 8), (5, 4, 6, 3))],
    prefill=[Tiling(*tile) for tile in product((128, 64), (64, 128, 32), (8, 4), (3, 2, 4))],
    splits=[Split(*split) for split in product((2, 1, 3, 4), (2, 1, 4), (256, 128))],
    repetitions=5,
)
SMALL = SweepSizes(
    head_sizes=(128, 64),
    batches=((40, 20),),
    prompt=20,
    decode=[Tiling(16, 32, 4, 1)],
    prefill=[Tiling(32, 32, 4, 1)],
    splits=[Split(2, 2, 16)],
    repetitions=1,
)


@dataclass(frozen=True)
class Trial(Generic[Candidate]):
    """The seconds of a candidate."""

    candidate: Candidate
    seconds: float


def measure(sizes: SweepSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Sweep until the deadline, and print the tables after each head size. The first one decides how work is split."""
    tables, split = dict(TILES), Split(PROGRAMS_PER_PROCESSOR, WAVES, MIN_CHUNK)
    for number, head_size in enumerate(sizes.head_sizes):
        last = number + 1 == len(sizes.head_sizes)
        with notes.kept(f"sweep, head size {head_size}"):
            own = deadline if last else deadline.part(_OWN)
            tables[head_size], split = _sweep(head_size, tables[head_size], split, sizes, device, notes, own)
            print(printed(tables, split), flush=True)


def _sweep(
    head_size: int,
    tiles: tuple[Tiling, Tiling],
    split: Split,
    sizes: SweepSizes,
    device: torch.device,
    notes: Notes,
    deadline: Deadline,
) -> tuple[tuple[Tiling, Tiling], Split]:
    """Return the best tiles of decoding and of prefill, and the best split for these."""
    trials = TileTrials(head_size, sizes.batches, sizes.prompt, sizes.repetitions, device)
    tile_time = deadline.part(_TILES)

    decode_until = tile_time.part(_DECODING)

    def decode_seconds(tiling: Tiling) -> float:
        return trials.decode_seconds(tiling, split)

    decoding = _chosen(f"decode_{head_size}", [tiles[0], *sizes.decode], decode_seconds, notes, decode_until)
    prompts = _chosen(f"prefill_{head_size}", [tiles[1], *sizes.prefill], trials.prefill_seconds, notes, tile_time)
    splits = sizes.splits if head_size == sizes.head_sizes[0] else ()

    def split_seconds(one: Split) -> float:
        return trials.decode_seconds(decoding, one)

    best = _chosen(f"split_{head_size}", [split, *splits], split_seconds, notes, deadline)
    return (decoding, prompts), best


def _chosen(
    name: str,
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], float],
    notes: Notes,
    deadline: Deadline,
) -> Candidate:
    """Return the best of the candidates, of which the first is committed, and write the seconds of all."""
    found = tried(candidates, run, deadline)
    notes.raw(f"sweep_{name}", list(map(_values, found)))
    notes.row(f"sweep_{name}_best_over_table", gain_of(found), "ratio", "the committed table")
    return best_of(found)


def tried(
    candidates: Iterable[Candidate], run: Callable[[Candidate], float], deadline: Deadline
) -> list[Trial[Candidate]]:
    """Time candidates until the deadline, the first in any case; those that fail are left out.

    Raises the failure of the first, which is the committed one.
    """
    found: list[Trial[Candidate]] = []
    for candidate in dict.fromkeys(candidates):
        if found and deadline.passed():
            break
        try:
            found.append(Trial(candidate, run(candidate)))
        except Exception as failure:
            if not found:
                raise
            print(f"{candidate} is left out: {failure}", flush=True)
    return found


def best_of(trials: Sequence[Trial[Candidate]]) -> Candidate:
    """Return the fastest candidate, the earliest of equal ones."""
    return min(trials, key=lambda trial: trial.seconds).candidate


def gain_of(trials: Sequence[Trial[Any]]) -> float:
    """Return the speed of the fastest candidate over that of the first."""
    return round(trials[0].seconds / min(trial.seconds for trial in trials), 3)


def printed(tables: Mapping[int, tuple[Tiling, Tiling]], split: Split) -> str:
    """Return the lines for engine/triton_kernels/tuning.py."""
    rows = [f"    {size}: ({_tiling(decode)}, {_tiling(prefill)})," for size, (decode, prefill) in tables.items()]
    constants = f"PROGRAMS_PER_PROCESSOR, WAVES, MIN_CHUNK = {', '.join(map(str, split))}"
    return "\n".join(["TILES = {", *rows, "}", constants])


def _tiling(tiling: Tiling) -> str:
    return f"Tiling{astuple(tiling)}"


def _values(trial: Trial[Any]) -> list[float]:
    candidate = trial.candidate
    return [*(astuple(candidate) if isinstance(candidate, Tiling) else candidate), trial.seconds]
