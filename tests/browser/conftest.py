"""A real browser, and what it must never do: fail in the console, or ask anybody else for anything."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.running_quire import RunningService

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
_FLAGS = (
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


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        yield chromium
        chromium.close()


class Watched:
    """A page, what its console said of errors, and where it asked for something."""

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def _hear(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def open(self, url: str) -> None:
        """Open a page, and wait until it shows what there is."""
        self.page.goto(url)
        self.page.wait_for_selector("html[data-state=live]")

    def evaluate(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def wait_for(self, expression: str, argument: Any = None) -> None:
        """Wait until an expression of JavaScript holds."""
        self.page.wait_for_function(expression, arg=argument)


@pytest.fixture
def watched(browser: "Browser") -> Iterator[Watched]:
    """A page; at the end nothing may have gone wrong in it that the test has not taken out of `errors`."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(_MILLISECONDS)
    one = Watched(context.new_page())
    yield one
    here, errors, hosts = urlsplit(one.page.url).netloc, list(one.errors), set(one.hosts)
    context.close()
    assert errors == []
    assert hosts <= {here}, "a page asks nobody but who it came from"


@pytest.fixture
def manager() -> Iterator[Callable[..., RunningService]]:
    """Starts KV managers with a page; all of them are stopped at the end."""
    started: list[RunningService] = []

    def start(*arguments: str) -> RunningService:
        usual = ("--listen", "127.0.0.1:0", "--map-listen", "127.0.0.1:0", "--grace-seconds", "0")
        started.append(RunningService("kvmanager", *usual, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def map_url(service: RunningService) -> str:
    return service.output.wait_for("kvmanager shows its blocks at ").split(" at ")[1]


@pytest.fixture
def screenshots() -> Path | None:
    """Where pictures are to be put, for people to look at: a folder named in QUIRE_SCREENSHOTS."""
    folder = os.environ.get("QUIRE_SCREENSHOTS")
    return Path(folder) if folder else None
