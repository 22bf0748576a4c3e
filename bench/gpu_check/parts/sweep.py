"""A sweep of tile shapes, splits and swaps: prints the tables of engine/triton_kernels/tuning.py with the best ones."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any, Generic, TypeVar

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes
from bench.gpu_check.tile_trials import Split, Swap, SwapSizes, SwapTrials, TileTrials
from engine.triton_kernels.tuning import (
    MIN_CHUNK,
    PROGRAMS_PER_PROCESSOR,
    SMALL_TILES,
    SWAP_PROGRAMS,
    WAVES,
    Tiles,
    Tiling,
    tiles_of,
)

_HEADING = "For engine/triton_kernels/tuning.py, if what `tunings` measures with them is better:"
Candidate = TypeVar("Candidate", Tiling, Split, Swap)

# Shares of the time that is left: for a head size but the last, for its tiles, of these for prefill, for splits, and of
# these for those that are not for few keys.
_OWN, _TILES, _PREFILL, _SPLITS, _MANY_KEYS = 0.65, 0.75, 0.5, 0.8, 0.6


@dataclass(frozen=True)
class SweepSizes:
    """Head sizes in the order of their sweep; batches of decoding, a prompt, and the candidates, likeliest first.

    The first head size also chooses `splits` for these batches, the least chunk for `few` keys, and `swaps`.
    """

    head_sizes: Sequence[int]
    batches: Sequence[Sequence[int]]
    few: Sequence[Sequence[int]]
    prompt: int
    decode: Sequence[Tiling]
    prefill: Sequence[Tiling]
    splits: Sequence[Split]
    chunks: Sequence[int]
    swaps: Sequence[Swap]
    swap: SwapSizes
    repetitions: int


FULL = SweepSizes(
    head_sizes=(128, 64),
    batches=((1024,) * 256, (32768, *(8192,) * 4, *(2048,) * 32, *(512,) * 128)),
    few=((1024,), (4096,)),
    prompt=8192,
    # Five stages keep one tile in flight, seven two; fewer than five are not pipelined.
    decode=[Tiling(16, *rest) for rest in product((64, 32, 128), (4, 8), (5, 7))],
    prefill=[
        Tiling(64, 64, 4, 5),
        Tiling(128, 64, 8, 7),
        Tiling(128, 64, 8, 3),
        Tiling(128, 128, 8, 5),
        Tiling(64, 64, 4, 7),
        Tiling(128, 32, 8, 5),
        Tiling(64, 32, 4, 5),
        Tiling(128, 32, 8, 7),
        Tiling(64, 64, 8, 5),
    ],
    splits=[Split(*split, MIN_CHUNK) for split in product((2, 1, 3), (2, 1, 4))],
    chunks=(64, 128, 256),
    swaps=[Swap(programs) for programs in (4, 2, 16, 8)],
    swap=SwapSizes(blocks=512, rows=256, width=4096, products=80),
    repetitions=5,
)
SMALL = SweepSizes(
    head_sizes=(128, 64),
    batches=((40, 20),),
    few=((20,),),
    prompt=20,
    decode=[Tiling(16, 32, 4, 1)],
    prefill=[Tiling(32, 32, 4, 1)],
    splits=[Split(2, 2, 16)],
    chunks=(16,),
    swaps=[Swap(2)],
    swap=SwapSizes(blocks=2, rows=4, width=32, products=1),
    repetitions=1,
)


@dataclass(frozen=True)
class Trial(Generic[Candidate]):
    """The seconds of a candidate."""

    candidate: Candidate
    seconds: float


def measure(sizes: SweepSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Sweep until the deadline, and print the tables. The first head size decides how work is split."""
    committed = tiles_of(device)
    name = "SMALL_TILES" if committed is SMALL_TILES else "TILES"
    tables, split, swap = dict(committed), Split(PROGRAMS_PER_PROCESSOR, WAVES, MIN_CHUNK), Swap(SWAP_PROGRAMS)
    for number, head_size in enumerate(sizes.head_sizes):
        last = number + 1 == len(sizes.head_sizes)
        with notes.kept(f"sweep, head size {head_size}"):
            own = deadline if last else deadline.part(_OWN)
            trials = TileTrials(head_size, [*sizes.batches, *sizes.few], sizes.prompt, sizes.repetitions, device)
            tables[head_size] = _tiles(
                trials, tables[head_size], split, sizes, notes, own.part(1 if number else _TILES)
            )
            if number == 0:
                decoding = tables[head_size][0]
                split = _split(trials, decoding, split, sizes, notes, own.part(_SPLITS))
                swaps = SwapTrials(trials, sizes.swap)
                swap = _chosen(f"swap_{head_size}", [swap, *sizes.swaps], swaps.seconds, notes, own)
    print(f"{_HEADING}\n{printed(tables, split, swap, name)}", flush=True)


def _tiles(
    trials: TileTrials, tiles: tuple[Tiling, Tiling], split: Split, sizes: SweepSizes, notes: Notes, deadline: Deadline
) -> tuple[Tiling, Tiling]:
    """Return the best tiles of decoding and of prefill."""
    prefill_until = deadline.part(_PREFILL)
    name = trials.head_size
    prompts = _chosen(f"prefill_{name}", [tiles[1], *sizes.prefill], trials.prefill_seconds, notes, prefill_until)

    def decode_seconds(tiling: Tiling) -> float:
        return trials.decode_seconds(tiling, split, sizes.batches)

    return _chosen(f"decode_{name}", [tiles[0], *sizes.decode], decode_seconds, notes, deadline), prompts


def _split(
    trials: TileTrials, decoding: Tiling, split: Split, sizes: SweepSizes, notes: Notes, deadline: Deadline
) -> Split:
    """Return the best split for the batches, with the least chunk that is best for few keys."""

    def seconds(one: Split) -> float:
        return trials.decode_seconds(decoding, one, sizes.batches)

    def seconds_of_few(one: Split) -> float:
        return trials.decode_seconds(decoding, one, sizes.few)

    name = trials.head_size
    best = _chosen(f"split_{name}", [split, *sizes.splits], seconds, notes, deadline.part(_MANY_KEYS))
    chunks = [best._replace(min_chunk=chunk) for chunk in sizes.chunks]
    return _chosen(f"chunk_{name}", [best, *chunks], seconds_of_few, notes, deadline)


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


def printed(tables: Tiles, split: Split, swap: Swap, name: str = "TILES") -> str:
    """Return the lines for engine/triton_kernels/tuning.py, where the table has this name."""
    rows = [f"    {size}: ({_tiling(decode)}, {_tiling(prefill)})," for size, (decode, prefill) in tables.items()]
    constants = f"PROGRAMS_PER_PROCESSOR, WAVES, MIN_CHUNK = {', '.join(map(str, split))}"
    return "\n".join([f"{name}: Tiles = {{", *rows, "}", constants, f"SWAP_PROGRAMS = {swap.programs}"])


def _tiling(tiling: Tiling) -> str:
    return f"Tiling{astuple(tiling)}"


def _values(trial: Trial[Any]) -> list[float]:
    candidate = trial.candidate
    return [*(astuple(candidate) if isinstance(candidate, Tiling) else candidate), trial.seconds]
