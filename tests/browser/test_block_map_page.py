"""The live block map in a real browser shows the KV manager's state."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from tests.browser.conftest import Watched, map_url
from tests.load import prompt_request
from tests.running_quire import RunningQuire, RunningService, start_quire
from tests.services.kvmanager.attach_stream import Stream, commits, extends

Stub = kvmanager_pb2_grpc.KVManagerStub

TALLY = "() => window.blockMap.tally('device')"
SHOWN = """() => Object.fromEntries([...document.querySelectorAll('#blocks-bar [data-count]')].map(one =>
    [one.dataset.count, Number(one.textContent.replaceAll(',', ''))]))"""
HELD = "held => window.blockMap.tally('device').held === held"
# The middle of a block on the page.
PLACE = """block => {
    const grid = window.blockMap.grids.device, box = grid.canvas.getBoundingClientRect(), [x, y] = grid.placeOf(block);
    return [box.x + x + grid.size / 2, box.y + y + grid.size / 2];
}"""


@pytest.fixture(scope="module")
def quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    folder = str(tiny_model("llama"))
    one = start_quire(
        "--model", folder, "--device-blocks", "64", "--max-sequences", "16", "--map-listen", "127.0.0.1:0"
    )
    yield one
    one.close()


@pytest.fixture
def engine(manager: Callable[..., RunningService]) -> tuple[str, Stream]:
    """The page's address, and a scripted engine with 20 blocks of 4 tokens."""
    one = manager()
    return map_url(one), Stream(Stub(one.channel)).attach()


def click(watched: Watched, block: int) -> None:
    watched.page.mouse.click(*watched.page.evaluate(PLACE, block))


def load(quire: RunningQuire, enough: threading.Event) -> None:
    """Run equal requests one after the other until `enough` is set."""
    while not enough.is_set():
        quire.generate(prompt_request("The quick brown fox jumps over the lazy dog " * 4, 60))


def panel(watched: Watched) -> str:
    return watched.page.inner_text("#panel")


def test_the_grid_equals_the_managers_counts_after_load(quire: RunningQuire, watched: Watched) -> None:
    watched.open(quire.map_url)
    enough = threading.Event()
    with ThreadPoolExecutor(12) as together:
        running = [together.submit(load, quire, enough) for _ in range(12)]
        try:
            watched.wait_for(
                "() => window.blockMap.tally('device').held > 0 && window.blockMap.tally('device').shared > 0"
            )
        finally:
            enough.set()
        for one in running:
            one.result()
    pool = quire.settled_pool()
    assert pool.totals.granted_blocks > 0
    assert pool.sequences == pool.device.held == pool.device.withheld == 0
    ended = {"free": pool.device.free, "cached": pool.device.cached, "held": 0, "withheld": 0, "shared": 0, "saved": 0}
    watched.comes_to(TALLY, ended)
    watched.comes_to(SHOWN, {"held by one": 0, "shared": 0, "cached": pool.device.cached, "free": pool.device.free})
    assert sum(watched.evaluate(SHOWN).values()) == pool.device_blocks, "the parts of the bar sum to the pool"


def test_changes_are_drawn_and_logged_live(engine: tuple[str, Stream], watched: Watched) -> None:
    url, stream = engine
    watched.open(url)
    assert watched.evaluate(TALLY)["held"] == 0
    stream.allocate(1, 9)
    watched.wait_for(HELD, 3)
    watched.page.wait_for_selector("#events >> text=Sequence 1 (request-1) was allocated 3 blocks (1-3).")
    stream.step(commits=commits((1, 0, [1] * 8)), forks=[pb.Fork(parent=1, child=2, length=9)])
    watched.wait_for("() => window.blockMap.tally('device').shared === 3")
    stream.step(extends=extends((1, [(2, 10)])))
    watched.comes_to(TALLY, {"free": 16, "cached": 0, "held": 4, "withheld": 0, "shared": 2, "saved": 2})
    watched.comes_to(SHOWN, {"held by one": 2, "shared": 2, "cached": 0, "free": 16})


def test_a_click_on_a_block_shows_its_holders_and_links_to_the_sequence(
    engine: tuple[str, Stream], watched: Watched
) -> None:
    url, stream = engine
    stream.allocate(1, 9)
    stream.step(commits=commits((1, 0, [1] * 8)), length_sequences=[1], length_tokens=[9])
    stream.step(forks=[pb.Fork(parent=1, child=2, length=9)])
    stream.step(extends=extends((1, [(2, 10)])), length_sequences=[2], length_tokens=[9])
    watched.open(url)
    click(watched, 2)
    watched.page.wait_for_selector("#panel[data-block='2']")
    text = panel(watched)
    assert "Block 2" in text
    assert "reference count 2" in text
    assert "logical block 1" in text
    assert "was forked" in text
    watched.page.click("#panel .holders button >> text=sequence 2")
    watched.page.wait_for_selector("#panel[data-sequence='2']")
    strip = watched.page.eval_on_selector_all("#panel .strip b", "found => found.map(one => Number(one.textContent))")
    assert strip == [1, 2, 4]
    assert watched.page.locator("#panel .strip .shared").count() == 2
    assert "of room for 12" in panel(watched)
    assert "It was scheduled by engine engine in step 1." in panel(watched)
    assert watched.evaluate("() => [...window.blockMap.grids.device.highlight]") == [1, 2, 4]
    stream.step(frees=[pb.Free(sequence=2, reason=pb.FREE_REASON_FINISHED)])
    watched.page.wait_for_selector("#panel.over >> text=has ended")
    watched.page.keyboard.press("Escape")
    watched.page.wait_for_selector("#panel >> text=Click a block")


def test_a_block_can_be_found_by_keyboard(engine: tuple[str, Stream], watched: Watched) -> None:
    url, stream = engine
    stream.allocate(1, 9)
    watched.open(url)
    watched.page.focus("#device canvas")
    watched.page.keyboard.press("ArrowRight")
    watched.page.keyboard.press("ArrowRight")
    watched.page.wait_for_selector("#spoken >> text='Block 3 · held · sequence 1 · partially filled'")
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_selector("#panel[data-block='3']")
    watched.page.click("#sequences button")
    watched.page.wait_for_selector("#panel[data-sequence='1']")


def test_a_redraw_keeps_the_selection(engine: tuple[str, Stream], watched: Watched) -> None:
    url, stream = engine
    stream.allocate(1, 9)
    watched.open(url)
    click(watched, 2)
    watched.page.hover("#panel .holders button")
    watched.page.mouse.down()
    for other in (2, 3):
        stream.allocate(other, 4)
        watched.page.wait_for_selector(f"#sequences tr[data-sequence='{other}']")  # loaded again, like the panel
    watched.page.mouse.up()
    watched.page.wait_for_selector("#panel[data-sequence='1']")


def test_tiers_are_shown_separately(manager: Callable[..., RunningService], watched: Watched) -> None:
    one = manager()
    stream = Stream(Stub(one.channel)).attach(host_blocks=10)
    stream.allocate(1, 9)
    stream.step(swap_outs=[1])
    watched.open(map_url(one))
    assert watched.page.is_visible("#host")
    assert watched.evaluate(TALLY)["held"] == 0
    assert watched.evaluate("() => window.blockMap.tally('host').held") == 3
    watched.page.click("#sequences button")
    watched.page.wait_for_selector("#panel >> text=3 in host memory")
    assert watched.evaluate("() => [...window.blockMap.grids.host.highlight].length") == 3


def test_fifty_thousand_blocks_are_drawn_and_the_page_stays_responsive(
    manager: Callable[..., RunningService], watched: Watched
) -> None:
    one = manager()
    stream = Stream(Stub(one.channel)).attach(device_blocks=50_000, block_size=16)
    for sequence in range(1, 101):
        stream.allocate(sequence, 16 * 400)
    watched.open(map_url(one))
    assert watched.evaluate(TALLY)["held"] == 40_000
    for round_ in range(3):
        for sequence in range(1, 101):
            number = 1000 * (round_ + 1) + sequence
            old = sequence if not round_ else 1000 * round_ + sequence
            stream.step(frees=[pb.Free(sequence=old, reason=pb.FREE_REASON_FINISHED)])
            stream.allocate(number, 16 * 300)
        click(watched, 7)
        watched.page.wait_for_selector("#panel[data-block='7']")
        watched.page.click("#zoom-in")
        watched.page.keyboard.press("Escape")
        watched.page.wait_for_selector("#panel >> text=Click a block")
    watched.wait_for(HELD, 30_000)


def test_the_page_reconnects_to_a_restarted_manager(manager: Callable[..., RunningService], watched: Watched) -> None:
    # At this address the port stays free for the restart, because local clients connect from 127.0.0.1.
    one = manager("--map-listen", "127.0.0.2:0")
    url = map_url(one)
    first = Stream(Stub(one.channel)).attach()
    first.allocate(1, 9)
    watched.open(url)
    watched.wait_for(HELD, 3)
    watched.expected = ("net::ERR_",)  # the browser logs failed connections
    one.kill()
    watched.page.wait_for_selector("html[data-state=away]")
    again = manager("--map-listen", url.removeprefix("http://"))
    watched.page.wait_for_selector("html[data-state=waiting]")
    second = Stream(Stub(again.channel)).attach()
    second.allocate(1, 20)
    watched.page.wait_for_selector("html[data-state=live]")
    watched.wait_for(HELD, 5)
    for stream in (first, second):
        stream.break_off()


def test_one_of_several_engines_pools_can_be_chosen(manager: Callable[..., RunningService], watched: Watched) -> None:
    one = manager()
    first = Stream(Stub(one.channel)).attach(engine_id="a")
    second = Stream(Stub(one.channel)).attach(engine_id="unix:/tmp/b.sock", device_blocks=30)
    first.allocate(1, 4)
    second.allocate(1, 40)
    watched.open(map_url(one))
    watched.wait_for(HELD, 1)
    watched.page.select_option("#pool", "unix:/tmp/b.sock")
    watched.wait_for(HELD, 10)
    assert watched.page.inner_text("#blocks-total") == "30 in all"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_block_states_differ_in_lightness_or_marks(
    engine: tuple[str, Stream], watched: Watched, scheme: Literal["light", "dark"]
) -> None:
    """Colour-blind readers see differences in lightness only."""
    watched.page.emulate_media(color_scheme=scheme)
    watched.open(engine[0])
    luminance = watched.evaluate("""() => {
        const colours = window.blockMap.grids.device.colours;
        const bright = (hex) => [1, 3, 5].map(at => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2)
            .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
        return Object.fromEntries(["free", "held", "shared", "cached"].map(name => [name, bright(colours[name])]));
    }""")
    ratios = [
        (max(luminance[one], luminance[other]) + 0.05) / (min(luminance[one], luminance[other]) + 0.05)
        for one, other in (("free", "held"), ("held", "shared"), ("held", "cached"))
    ]
    assert min(ratios) > 1.5
