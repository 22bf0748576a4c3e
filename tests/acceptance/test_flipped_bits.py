"""Two thousand flipped bits in kept blocks, host blocks and seals, and five hundred each in 8 bits and with windows.

None reaches a token: all answers are those of the same model without flips. Each block that a request reaches is
condemned.
"""

import gc
import random
import shutil
import tempfile
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

from engine.kept.header import HEADER_BYTES, read_header
from engine.kept.kept_memory import KeptMemory
from tests.acceptance.conftest import Record
from tests.engine.conftest import checkpoint  # noqa: F401 - a fixture
from tests.engine.families import FAMILIES, Checkpoint
from tests.engine.kept.flips import between_lives, on_the_host
from tests.engine.kept.sealed_engine import NativeEngine, SealedEightBitEngine, SealedEngine, WindowedEngine
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import START_SECONDS, start_quire
from tests.scrape import Scrape


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
    "windows": Way("gemma2", WindowedEngine, 264, 160, 110),
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


# A served engine: its memory is a file, in which a bit of each sealed block is flipped while no process has it.

PROMPT_TOKENS = 200
TOKENS = 12
HIT_BLOCKS = (PROMPT_TOKENS - 1) // 16


def test_a_served_engine_computes_what_was_flipped_again(tiny_model: Callable[[str], Path], record: Record) -> None:
    folder = Path(tempfile.mkdtemp(prefix="quire-test-", dir="/dev/shm"))
    memory = folder / "kept"
    size = (
        "--device-blocks",
        "64",
        "--host-blocks",
        "8",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--checksums",
        "auto",
    )
    options = ("--model", str(tiny_model("llama")), "--keep-blocks", str(memory), *size, "--max-restarts", "9")
    quire = start_quire(*options)
    try:
        draw = random.Random(5)
        request = prompt_request("", TOKENS)
        request.prompt.token_ids.ids.extend(draw.randrange(5, 300) for _ in range(PROMPT_TOKENS))
        expected = quire.generate(request).token_ids
        assert quire.generate(request).token_ids == expected
        wait_until(
            lambda: Scrape.of(quire.metrics_urls["engine"]).value("quire_kept_blocks", tier="device") > 10,
            "blocks are sealed",
        )
        seen = len(quire.output.lines)
        engine = psutil.Process(quire.children()["engine"])
        engine.suspend()
        flipped = flip_blocks(memory, draw)
        engine.kill()
        quire.output.wait_for("engine is ready", START_SECONDS, seen)
        quire.output.wait_for("serves tiny-llama", START_SECONDS, seen)
        shown = quire.output.wait_for("engine shows its metrics at ", START_SECONDS, seen)
        quire.metrics_urls["engine"] = shown.split(" at ")[1]
        assert quire.generate(request).token_ids == expected
        metrics = Scrape.of(quire.metrics_urls["engine"])
        found = metrics.values("quire_kv_wrong_blocks_total", "reason")
        withheld = quire.settled_pool().device.withheld
        record(flipped=flipped, found=found, withheld=withheld)
        assert found["adoption"] == withheld == HIT_BLOCKS <= flipped
        assert quire.generate(request).token_ids == expected, "what was computed again is right"
    finally:
        quire.close()
        shutil.rmtree(folder)


def flip_blocks(path: Path, draw: random.Random) -> int:
    """Flip a bit of each sealed device block of a kept memory; return how many there are."""
    with path.open("r+b") as file, mmap(file.fileno(), 0) as pages:
        identity = read_header(pages[:HEADER_BYTES])
        assert identity is not None
        kind = KeptMemory.mapped(memoryview(pages), identity).kinds[0]
        rows = kind.cache.view(torch.uint8)
        sealed = [block for block in range(1, len(kind.device) + 1) if kind.device.sealing(block)]
        for block in sealed:
            rows[block, draw.randrange(rows.shape[1])] ^= 1 << draw.randrange(8)
        del kind, rows
        gc.collect()  # nothing may refer to the pages when they are unmapped
    return len(sealed)
