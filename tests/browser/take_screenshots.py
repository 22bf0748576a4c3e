"""Take the pictures of the pages in docs/images: `python -m tests.browser.take_screenshots [FOLDER]`.

Real services with the demo model, real requests, a real browser: block map, sandbox and chat page, at 1280 and 400
pixels, light and dark. Requests are as good as equal in each run; block ids and step numbers differ with the timing.
"""

import io
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import grpc
from PIL import Image

from quire.v1 import gateway_pb2
from tests.browser.conftest import CHROMIUM, FLAGS
from tests.load import prompt_request
from tests.running_quire import RunningQuire, start_quire

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = Path(__file__).parents[2] / "docs" / "images"
# Width and height of the window, and what a file's name says of it.
WINDOWS = {"": (1280, 800), "-narrow": (400, 860)}
SCHEMES: dict[str, Literal["light", "dark"]] = {"": "light", "-dark": "dark"}
_TOKENS = 900
_PREFIX = "You write short, plain sentences about rivers, bread, and the sea, and you number them. " * 12
_TURNS = ("Why is bread better by the sea? Explain it in a few sentences.", "And at a river, in the mountains?")
_ENGINE = ("--engine-id", "engine-1", "--device-blocks", "480", "--host-blocks", "64", "--max-sequences", "16")


def main(folder: Path) -> None:
    """Take all."""
    from playwright.sync_api import sync_playwright

    if not CHROMIUM:
        sys.exit("chromium is not installed: install it, or name it in CHROMIUM")
    listen = ("--map-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    quire = start_quire("--model", "demo", *listen, "--dtype", "auto", *_ENGINE)
    try:
        with sync_playwright() as running:
            browser = running.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            with under_load(quire):
                take(browser, quire.map_url, "block-map", folder, show_map)
            take(browser, f"{quire.map_url}/sandbox", "sandbox", folder, show_sandbox)
            take(browser, f"{quire.http_url}/chat/", "chat", folder, show_chat)
            browser.close()
    finally:
        quire.close()


def take(browser: "Browser", url: str, name: str, folder: Path, show: Callable[["Page"], None]) -> None:
    """Take a page's pictures in each window and scheme."""
    for narrow, (width, height) in WINDOWS.items():
        for dark, scheme in SCHEMES.items():
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                reduced_motion="reduce",
            )
            page = context.new_page()
            page.goto(url)
            page.wait_for_selector("html[data-state=live]")
            show(page)
            page.mouse.move(0, 0)
            # On a narrow window the whole page, because its parts are below each other.
            picture = Image.open(io.BytesIO(page.screenshot(full_page=bool(narrow))))
            path = folder / f"{name}{narrow}{dark}.png"
            picture.convert("RGB").save(path, optimize=True)
            sys.stdout.write(f"taken: {path.name}, {picture.width} x {picture.height}\n")
            context.close()


def show_map(page: "Page") -> None:
    """Choose one of four samples that share their prompt."""
    page.wait_for_function("() => window.blockMap.tally('device').shared > 10")
    chosen = page.locator("#sequences tr:not(.ended) td:nth-child(2)", has_text="samples").first
    chosen.click()
    page.wait_for_selector("#panel .strip")
    page.wait_for_function("() => document.querySelectorAll('#events li').length > 6")


def show_sandbox(page: "Page") -> None:
    """Run the beam search to its end."""
    for _ in range(6):
        before = page.get_attribute("html", "data-operation")
        page.click("#beam")
        page.wait_for_function("before => document.documentElement.dataset.operation !== before", arg=before)


def show_chat(page: "Page") -> None:
    """Stop in the middle of the second answer, whose first blocks are hits."""
    for number, text in enumerate(_TURNS, 1):
        page.fill("#draft", text)
        page.press("#draft", "Enter")
        page.wait_for_function(
            "most => document.querySelectorAll('#table .strip li').length > most", arg=1 + 2 * number
        )
        if number < len(_TURNS):
            page.click("#send")
            page.wait_for_selector("#paging.over")
    page.wait_for_function("() => window.chatPage.paging.cached")


@contextmanager
def under_load(quire: RunningQuire) -> Iterator[None]:
    """Run requests until the end: some that share a beginning, one of four samples, and short ones that end."""
    over = threading.Event()
    with ThreadPoolExecutor(8) as clients:
        for number in range(8):
            clients.submit(_run, quire, number, over)
        try:
            _wait_for_cached(quire)
            yield
        finally:
            over.set()


def _run(quire: RunningQuire, number: int, over: threading.Event) -> None:
    round_ = 0
    while not over.is_set():
        call = quire.gateway.Generate(_request(number, round_))
        with suppress(grpc.RpcError):
            for _ in call:
                if over.is_set():
                    call.cancel()
        round_ += 1


def _request(number: int, round_: int) -> gateway_pb2.GenerateRequest:
    """Build a request: the first four run long, the others are short and follow each other."""
    long = number < 4
    text = _PREFIX if number < 2 else f"{number}.{round_}: a story of the town at the river. " * 6
    request = prompt_request(text, _TOKENS if long else 40 + 20 * number, seed=number)
    request.request_id = f"{'samples' if number == 0 else 'story'}-{number}-{round_}"
    if number == 0:
        request.sampling.sample_count = 4
    return request


def _wait_for_cached(quire: RunningQuire) -> None:
    pause = threading.Event()
    while quire.pool().device.cached < 40:
        pause.wait(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
