"""Tuned tiles on the processors of each GPU, by the pinned Triton and by an older one."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from engine.triton_kernels.tuning import PROGRAMS_PER_PROCESSOR
from tests.engine.gpu_resources import PROCESSORS, Resources
from tests.engine.triton_kernels.test_triton_compiles import check_kernels

PROCESSES = 2
# Programs of compute capabilities 8.6, 8.9 and 12.0 have less shared memory than those of 8.0, and the same tiles.
SMALLEST = 99 << 10


def test_programs_of_every_tuned_tile_can_be_launched_and_are_pipelined() -> None:
    check_tiles(found_for_each("all", "sampler"))


def test_programs_of_every_tuned_tile_are_pipelined_by_an_older_triton(older_triton: Path) -> None:
    check_tiles(found_for_each("all", packages=older_triton))


def found_for_each(*which: str, packages: Path | None = None) -> list[Resources]:
    """Compile for each capability, in two processes at a time."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        check = partial(check_kernels, *which, packages=packages)
        return [one for found in pool.map(check, map(str, PROCESSORS)) for one in found]


def check_tiles(found: list[Resources]) -> None:
    # All programs of decoding run at a time for common heads; work is split on that assumption.
    decoding = [
        one.programs for one in found if one.kernel == "_decode" and one.shared <= 73 << 10 and one.threads == 128
    ]
    assert decoding
    assert min(decoding) >= PROGRAMS_PER_PROCESSOR
    assert [one for one in found if one.capability == 80 and one.shared > SMALLEST] == []
    # Prefill is split on the assumption that its programs have 8 warps on a processor.
    prefill = [one for one in found if one.kernel == "_prefill"]
    assert [one for one in prefill if one.programs * one.threads < 256] == []
