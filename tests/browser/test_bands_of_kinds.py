"""The block map of a model with windows has a band for each kind, in each tier, with the KV manager's counts."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.v1 import kvmanager_pb2 as pb
from tests.browser.conftest import Watched
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningQuire, start_quire

KIND = "window-40"
TALLY = "() => { const {free, cached, held} = window.blockMap.tally('device-1'); return {free, cached, held}; }"
# The middle of a block in the band of the window kind.
PLACE = """block => {
    const grid = window.blockMap.grids["device-1"], box = grid.canvas.getBoundingClientRect();
    const [x, y] = grid.placeOf(block);
    grid.canvas.scrollIntoView();
    const now = grid.canvas.getBoundingClientRect();
    return [now.x + x + grid.size / 2, now.y + y + grid.size / 2];
}"""


@pytest.fixture(scope="module")
def quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    pool = ("--device-blocks", "96", "--host-blocks", "16", "--max-sequences", "4", "--token-budget", "64")
    one = start_quire("--model", str(tiny_model("windowed")), *pool, "--map-listen", "127.0.0.1:0")
    yield one
    one.close()


def captions(watched: Watched) -> list[str]:
    shown: list[str] = watched.evaluate(
        "() => [...document.querySelectorAll('figure:not([hidden]) figcaption')].map(one => one.firstChild.textContent)"
    )
    return [one.strip() for one in shown]


def test_each_kind_has_a_band_in_each_tier_with_the_managers_counts(quire: RunningQuire, watched: Watched) -> None:
    watched.open(quire.map_url)
    watched.wait_for("() => window.blockMap.grids['device-1'] !== undefined")
    assert [one for one in captions(watched) if one.startswith(KIND)] == [
        f"{KIND}, device memory",
        f"{KIND}, host memory",
    ]
    quire.generate(prompt_request("The quick brown fox jumps over the lazy dog " * 4, 40))
    [own] = quire.settled_pool().kinds
    watched.comes_to(TALLY, {"free": own.device.free, "cached": own.device.cached, "held": 0})
    assert own.device.cached


def test_a_block_of_a_band_is_chosen_with_its_kind(quire: RunningQuire, watched: Watched) -> None:
    quire.generate(prompt_request("Sphinx of black quartz, judge my vow. " * 5, 20))
    watched.open(quire.map_url)
    watched.wait_for(
        "() => window.blockMap.grids['device-1'] !== undefined && window.blockMap.tally('device-1').cached"
    )
    shown = quire.kvmanager.GetBlockMap(pb.GetBlockMapRequest(kind=KIND), timeout=CALL_SECONDS)
    block = list(shown.states).index(pb.BLOCK_STATE_CACHED) + 1
    watched.page.mouse.click(*watched.page.evaluate(PLACE, block))
    title = f"Block {block} of kind {KIND}, device memory"
    watched.wait_for("title => document.querySelector('#panel h2')?.innerText.includes(title)", title)
    watched.wait_for(f"() => document.querySelector('#panel').innerText.includes('of kind {KIND}')")
    assert watched.errors == []
