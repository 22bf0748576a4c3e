"""What a reader of the block map looks at stays: focus, places, sizes; and everything is said in words or signs."""

from collections.abc import Callable
from typing import Any, Literal

import pytest

from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from tests.browser.conftest import Watched, map_url
from tests.running_quire import RunningService
from tests.services.kvmanager.attach_stream import Stream, commits

Stub = kvmanager_pb2_grpc.KVManagerStub

FOCUSED = "() => document.activeElement.closest('tr')?.dataset.sequence"
ROWS = """() => Object.fromEntries([...document.querySelectorAll('#sequences tr')].map(row =>
    [row.dataset.sequence, row.getBoundingClientRect().top]))"""
BOXES = """() => [...document.querySelectorAll(
        '#summary li, #figures dd, #legend li, .tools > *, canvas, aside > section, .list h2, th')]
    .flatMap(one => { const box = one.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]; })"""
# Colours of two points of a block: in its upper and its lower half, beside its signs.
HALVES = """block => {
    const grid = window.blockMap.grids.device, [x, y] = grid.placeOf(block), scale = devicePixelRatio;
    return [0.25, 0.7].map(share => [...grid.context.getImageData(
        Math.round((x + grid.size * 0.2) * scale), Math.round((y + grid.size * share) * scale), 1, 1).data].join(' '));
}"""
# Contrast, as WCAG defines it, of the signs on the colours of blocks.
SIGNS = """() => {
    const colours = window.blockMap.grids.device.colours;
    const channel = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const bright = (hex) => [1, 3, 5].map(at => channel(parseInt(hex.slice(at, at + 2), 16) / 255))
        .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
    const contrast = (one, other) => {
        const [low, high] = [bright(one), bright(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    return Object.fromEntries(['cached', 'held', 'shared', 'withheld'].map(name =>
        [name, contrast(colours[name], colours.mark)]));
}"""
LONG = "tenant/chatcmpl-0123456789abcdef0123456789abcdef-of-an-agent"


@pytest.fixture
def service(manager: Callable[..., RunningService]) -> RunningService:
    return manager()


@pytest.fixture
def stream(service: RunningService, watched: Watched) -> Stream:
    """A scripted engine with 20 blocks of 4 tokens, and the page that shows it."""
    one = Stream(Stub(service.channel)).attach()
    watched.open(map_url(service))
    return one


def free(*sequences: int) -> dict[str, Any]:
    return {"frees": [pb.Free(sequence=one, reason=pb.FREE_REASON_FINISHED) for one in sequences]}


def row(sequence: int, kind: str = "") -> str:
    return f"#sequences tr{kind}[data-sequence='{sequence}']"


def test_focus_and_places_of_rows_stay_while_sequences_come_and_go(stream: Stream, watched: Watched) -> None:
    for sequence in (1, 2, 3):
        stream.allocate(sequence, 4)
    watched.page.wait_for_selector(row(3))
    watched.page.focus(f"{row(2)} button")
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_selector("#panel[data-sequence='2']")
    before = watched.evaluate(ROWS)
    stream.step(**free(1))
    watched.page.wait_for_selector(row(1, ".ended"))
    assert watched.evaluate(ROWS) == before
    for sequence in (4, 5):
        stream.allocate(sequence, 4)
    watched.page.wait_for_selector(row(5))
    after = watched.evaluate(ROWS)
    assert (after["2"], after["3"]) == (before["2"], before["3"])
    assert after["4"] == before["1"], "a new sequence takes the place of an ended one"
    assert watched.evaluate(FOCUSED) == "2"
    assert watched.page.get_attribute(f"{row(2)} button", "aria-pressed") == "true"
    stream.step(**free(2, 3, 4, 5))
    watched.page.wait_for_selector(row(2, ".ended"))
    for sequence in (6, 7, 8, 9):  # more than there are other rows
        stream.allocate(sequence, 4)
    watched.page.wait_for_selector(row(9))
    assert watched.evaluate(FOCUSED) == "2", "the chosen sequence keeps its row after its end"
    assert watched.page.get_attribute("#panel", "data-sequence") == "2"


def test_focus_in_the_details_stays_with_its_sequence_when_others_go(stream: Stream, watched: Watched) -> None:
    stream.allocate(1, 9)
    stream.step(commits=commits((1, 0, [1] * 8)), forks=[pb.Fork(parent=1, child=child, length=9) for child in (2, 3)])
    watched.page.click(f"{row(3)} button")
    watched.page.focus("#panel [data-key='sequence 2']")
    stream.step(**free(1))
    watched.page.wait_for_selector("#panel [data-key='sequence 1']", state="detached")
    assert watched.evaluate("() => document.activeElement.dataset.key") == "sequence 2"


def test_nothing_moves_when_numbers_and_rows_change(stream: Stream, watched: Watched) -> None:
    watched.wait_for("() => !document.querySelector('#idle').hidden")
    before = pytest.approx(watched.evaluate(BOXES), abs=0.5)  # of pixels
    assert len(watched.evaluate(BOXES)) > 80
    for sequence in range(1, 20):
        stream.allocate(sequence, 4)
    watched.page.wait_for_selector(row(19))
    assert watched.evaluate(BOXES) == before
    stream.step(**free(*range(1, 20)))
    watched.wait_for("() => !document.querySelector('#idle').hidden")
    assert watched.evaluate(BOXES) == before


def test_the_grid_does_not_scroll_back_to_the_chosen_sequence(service: RunningService, watched: Watched) -> None:
    stream = Stream(Stub(service.channel)).attach(device_blocks=20_000)
    stream.allocate(1, 4)
    watched.open(map_url(service))
    for _ in range(3):
        watched.page.click("#zoom-in")
    watched.page.click(f"{row(1)} button")
    watched.page.wait_for_selector("#panel[data-sequence='1']")
    watched.evaluate("() => { document.querySelector('#device .scroll').scrollTop = 1e6; }")
    place = watched.evaluate("() => document.querySelector('#device .scroll').scrollTop")
    assert place > 100
    stream.allocate(2, 4)
    watched.page.wait_for_selector(row(2))
    stream.step(length_sequences=[1], length_tokens=[4])
    stream.allocate(3, 4)
    watched.page.wait_for_selector(row(3))
    assert watched.evaluate("() => document.querySelector('#device .scroll').scrollTop") == place


def test_a_long_id_is_shortened_in_the_middle_and_copied_whole(stream: Stream, watched: Watched) -> None:
    watched.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    stream.allocate(1, 4, request_id=LONG)
    watched.page.wait_for_selector(row(1))
    shown = watched.page.inner_text(f"{row(1)} .id [aria-hidden]")
    whole = watched.page.get_attribute(f"{row(1)} .id", "title") or ""
    head, tail = shown.split("…")
    assert (whole.startswith(head), whole.endswith(tail), len(shown) < 22) == (True, True, True)
    assert whole == LONG.removeprefix("tenant/"), "a page without keys shows no tenant"
    watched.page.focus(f"{row(1)} .copy")
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_selector(f"#spoken >> text='Copied request {whole}'")
    assert watched.evaluate("() => navigator.clipboard.readText()") == whole
    assert watched.page.get_attribute("#panel", "data-sequence") != "1", "copying chooses nothing"
    watched.page.click(f"{row(1)} button")
    watched.page.wait_for_selector("#panel[data-sequence='1']")
    assert watched.page.get_attribute("#panel .id", "title") == whole


def test_a_partly_filled_block_has_a_pale_upper_half_as_the_legend_says(stream: Stream, watched: Watched) -> None:
    stream.allocate(1, 6)
    stream.step(commits=commits((1, 0, [1] * 4)), length_sequences=[1], length_tokens=[6])
    watched.wait_for("() => window.blockMap.grids.device.cells[1] & 4")
    watched.expected = ("willReadFrequently",)  # the browser's advice for pages that read their canvas often
    full, partly = watched.page.evaluate(HALVES, 1), watched.page.evaluate(HALVES, 2)
    assert full[0] == full[1] == partly[1] != partly[0]
    legend = watched.page.inner_text("#legend").split("\n")
    states = ["free", "cached", "held by one", "partly filled", "shared", "pinned", "withheld"]
    assert legend == states


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_signs_have_contrast_on_their_blocks(
    stream: Stream, watched: Watched, scheme: Literal["light", "dark"]
) -> None:
    watched.page.emulate_media(color_scheme=scheme)
    watched.wait_for("dark => window.blockMap.grids.device.dark === dark", scheme == "dark")
    contrasts = watched.evaluate(SIGNS)
    assert {name: one for name, one in contrasts.items() if one < 3} == {}


def test_an_empty_page_shows_the_command_to_run(service: RunningService, watched: Watched) -> None:
    watched.page.goto(map_url(service))
    watched.page.wait_for_selector("#waiting >> text=No engine is attached yet.")
    commands = watched.page.eval_on_selector_all("#waiting .id", "found => found.map(one => one.textContent)")
    assert commands == ["quire serve", "quire engine --kvmanager 127.0.0.1:50053"]
    stream = Stream(Stub(service.channel)).attach()
    watched.page.wait_for_selector("#idle >> text=No request is running.")
    assert watched.page.inner_text("#idle .id") == 'quire generate "Once upon a time"'
    stream.allocate(1, 4)
    watched.page.wait_for_selector("#idle", state="hidden")
