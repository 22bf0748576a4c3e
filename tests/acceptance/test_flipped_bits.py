"""Two thousand flipped bits in kept blocks, host blocks and seals, and five hundred each in 8 bits and with windows.

None reaches a token: all answers are those of the same model without flips. Each block that a request reaches is
condemned.
"""

from typing import NamedTuple

import pytest

from tests.acceptance.conftest import Record
from tests.engine.conftest import checkpoint  # noqa: F401 - a fixture
from tests.engine.families import FAMILIES, Checkpoint
from tests.engine.kept.flips import between_lives, on_the_host
from tests.engine.kept.sealed_engine import NativeEngine, SealedEightBitEngine, SealedEngine, WindowedEngine


class Way(NamedTuple):
    """A model and its engine, with the numbers of flips in kept blocks, in host blocks and in seals."""

    family: str
    made: type[SealedEngine]
    blocks: int
    host_blocks: int
    seals: int


WAYS = {
    "the CPU's kernels": Way("llama", NativeEngine, 1000, 600, 400),
    "8 bits": Way("llama", SealedEightBitEngine, 250, 150, 100),
    "windows": Way("gemma2", WindowedEngine, 250, 150, 100),
}
OF_A_ROUND = 4


@pytest.mark.parametrize("name", WAYS)
def test_no_flipped_bit_reaches_a_token(checkpoint: Checkpoint, name: str, record: Record) -> None:  # noqa: F811
    way = WAYS[name]
    folder = checkpoint(FAMILIES[way.family])
    kinds = 2 if name == "windows" else 1
    kept = between_lives(way.made, folder, seed=11, rounds=way.blocks // OF_A_ROUND // kinds)
    on_host = on_the_host(way.made, folder, seed=12, count=way.host_blocks)
    seals = between_lives(way.made, folder, seed=13, rounds=way.seals // OF_A_ROUND // kinds, seals=True)
    record(
        flips=kept.count + on_host.count + seals.count,
        kept_blocks_reached=kept.found,
        host_blocks_reached=on_host.found,
        of_seals=seals.count,
    )
    assert kept.count + on_host.count + seals.count >= 0.9 * (way.blocks + way.host_blocks + way.seals)
    assert kept.found > way.blocks / 20
    assert on_host.found > way.host_blocks / 20
