"""Tuned tiles on the processors of each GPU."""

from engine.triton_kernels.tuning import PROGRAMS_PER_PROCESSOR
from tests.engine.gpu_resources import PROCESSORS
from tests.engine.triton_kernels.test_triton_compiles import check_kernels


def test_programs_of_every_tuned_tile_can_be_launched() -> None:
    found = check_kernels("all", "sampler", *map(str, PROCESSORS))
    # All programs of decoding run at a time for common heads; work is split on that assumption.
    decoding = [
        one.programs for one in found if one.kernel == "_decode" and one.shared <= 73 << 10 and one.threads == 128
    ]
    assert decoding
    assert min(decoding) >= PROGRAMS_PER_PROCESSOR
