"""A real browser whose pages must log no errors and load nothing from other hosts."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.running_quire import RunningService

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_MILLISECONDS = 60_000
_LAUNCH_MILLISECONDS = 180_000
# True for two objects with the same keys and values.
_SAME = """(one, other) =>
    JSON.stringify(Object.entries(one).sort()) === JSON.stringify(Object.entries(other).sort())"""


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), timeout=_LAUNCH_MILLISECONDS)
        yield chromium
        chromium.close()


class Watched:
    """A page with the errors of its console and the hosts of its requests.

    Errors that contain a text of `expected` are part of the test.
    """

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.expected: tuple[str, ...] = ()
        self._errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self._errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def _on_console(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self._errors.append(f"{message.text} ({message.location.get('url', '')})")

    @property
    def errors(self) -> list[str]:
        """Unexpected errors so far."""
        return [error for error in self._errors if not any(text in error for text in self.expected)]

    def open(self, url: str) -> None:
        """Open a page, and wait until it shows live data."""
        self.page.goto(url)
        self.page.wait_for_selector("html[data-state=live]")

    def evaluate(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def wait_for(self, expression: str, argument: Any = None) -> None:
        """Wait until a JavaScript expression is true."""
        self.page.wait_for_function(expression, arg=argument)

    def comes_to(self, expression: str, expected: dict[str, Any]) -> None:
        """Wait until a JavaScript function returns an object; a change may be drawn in several steps."""
        from playwright import sync_api

        with suppress(sync_api.TimeoutError):
            self.wait_for(f"expected => ({_SAME})(({expression})(), expected)", expected)
        assert self.evaluate(expression) == expected


@pytest.fixture
def watched(browser: "Browser") -> Iterator[Watched]:
    """A page that must have no unexpected errors at the end."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(_MILLISECONDS)
    one = Watched(context.new_page())
    yield one
    here, errors, hosts = urlsplit(one.page.url).netloc, one.errors, set(one.hosts)
    context.close()
    assert errors == []
    assert hosts <= {here}, "a page loads from its own host only"


@pytest.fixture
def manager() -> Iterator[Callable[..., RunningService]]:
    """Starts KV managers with pages, and stops them at the end."""
    started: list[RunningService] = []

    def start(*arguments: str) -> RunningService:
        usual = ("--listen", "127.0.0.1:0", "--map-listen", "127.0.0.1:0", "--grace-seconds", "0")
        started.append(RunningService("kvmanager", *usual, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def map_url(service: RunningService) -> str:
    return service.output.wait_for("block map at ").split(" at ")[1]
