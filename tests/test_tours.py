"""One request makes the calls of docs/tours.md in their order."""

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.one_process import ROOT, calls, one_process

PAGE = ROOT / "docs" / "tours.md"
TOURS = ("A request", "A step", "A block id", "A token")
PROMPT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
SECONDS = 60.0
_ROW = re.compile(r"^\| `(?P<room>[\w/]+)` \| `(?P<call>[\w.]+:[\w.<>]+)` \|", re.MULTILINE)


def tour(title: str) -> list[tuple[str, str]]:
    """The rows of a tour: a room, and a call in it."""
    _, _, rest = PAGE.read_text().partition(f"\n### {title}\n")
    return [(row["room"], row["call"]) for row in _ROW.finditer(rest.partition("\n#")[0])]


def missing(listed: list[str], made: list[str]) -> list[str]:
    """The listed calls that are missing or too early."""
    remaining = iter(made)
    return [call for call in listed if call not in remaining]


async def calls_of_one_request(model: Path, sockets: Path) -> list[str]:
    """The product's calls from an HTTP request for one token until the last call of every tour."""
    made: list[str] = []
    awaited = {tour(title)[-1][1] for title in TOURS}
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note(call: str) -> None:
        made.append(call)
        if call in awaited and all(not missing([call for _, call in tour(title)], made) for title in TOURS):
            loop.call_soon_threadsafe(ended.set)

    with calls(note):
        async with one_process(model, sockets) as client:
            made.clear()
            answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
            answer.raise_for_status()
            with suppress(TimeoutError):  # the tests report which call is missing
                await asyncio.wait_for(ended.wait(), SECONDS)
            return list(made)


@pytest.fixture(scope="module")
def made(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return asyncio.run(calls_of_one_request(tiny_model("llama"), tmp_path_factory.mktemp("sockets")))


@pytest.mark.parametrize("title", TOURS)
def test_one_request_makes_the_calls_of_a_tour_in_their_order(title: str, made: list[str]) -> None:
    assert missing([call for _, call in tour(title)], made) == []


@pytest.mark.parametrize("title", TOURS)
def test_each_call_of_a_tour_is_in_the_named_room(title: str) -> None:
    rows = tour(title)
    assert len(rows) > 8
    for room, call in rows:
        module = call.partition(":")[0]
        assert module == room.replace("/", ".") or module.rpartition(".")[0] == room.replace("/", "."), call


def test_a_step_is_followed_in_ten_calls_over_eight_files() -> None:
    listed = [call for _, call in tour("A step")]
    assert len(listed) <= 10
    assert len({call.partition(":")[0] for call in listed}) <= 8
