"""Requests in flight, retries, and ends of a batch."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.batch import run as run_module
from services.cli.batch.answers import AnswerFile
from services.cli.batch.endpoints import Response, Unreachable
from services.cli.batch.lines import URLS, Line, parse
from services.cli.batch.run import Totals, Window, run

pytestmark = pytest.mark.anyio

OK = Response(200, "id", {"usage": {"prompt_tokens": 3, "completion_tokens": 2}})


def lines(*bodies: dict[str, Any]) -> list[Line]:
    requests = [
        {"custom_id": f"r{at}", "method": "POST", "url": URLS[0], "body": {"number": at, **body}}
        for at, body in enumerate(bodies)
    ]
    return [parse(at + 1, json.dumps(one).encode()) for at, one in enumerate(requests)]


class Endpoint:
    """Answers a request when it is told to, or with what `answers` has for it."""

    def __init__(self, *answers: Response | Exception) -> None:
        self.answers = list(answers)
        self.waiting: dict[int, asyncio.Future[Response]] = {}
        self.arrived = asyncio.Event()
        self.calls = 0

    async def post(self, _url: str, body: bytes) -> Response:
        self.calls += 1
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        number = json.loads(body)["number"]
        self.waiting[number] = asyncio.get_running_loop().create_future()
        self.arrived.set()
        return await self.waiting[number]

    async def until(self, numbers: set[int]) -> None:
        """Wait until exactly these requests wait."""
        while self.waiting.keys() != numbers:
            self.arrived.clear()
            await self.arrived.wait()
        await asyncio.sleep(0)
        assert self.waiting.keys() == numbers

    def finish(self, number: int) -> None:
        self.waiting.pop(number).set_result(OK)


class Run:
    """A run in the background."""

    def __init__(self, path: Path, endpoint: Endpoint, work: list[Line], window: int = 100) -> None:
        self.answers, self.totals, self.path = AnswerFile(path), Totals(), path
        self.answers.begin()
        self.shown: list[Totals] = []
        self.task = asyncio.create_task(
            run(work, endpoint, self.answers, Window(window), self.totals, self.shown.append)
        )

    async def ended(self) -> None:
        try:
            await self.task
        finally:
            self.answers.close()

    def ids(self) -> list[str]:
        return [json.loads(line)["custom_id"] for line in self.path.read_text().splitlines()]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "answers"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_PAUSES", (0.0, 0.0))


async def test_as_many_sequences_as_the_window_run_at_a_time(output: Path) -> None:
    endpoint = Endpoint()
    batch = Run(output, endpoint, lines({}, {"n": 2}, {}, {"n": 9}, {}), window=3)
    await endpoint.until({0, 1})
    endpoint.finish(1)
    await endpoint.until({0, 2})
    endpoint.finish(2)
    endpoint.finish(0)
    await endpoint.until({3})  # more than the window, so alone
    endpoint.finish(3)
    await endpoint.until({4})
    endpoint.finish(4)
    await batch.ended()
    assert batch.ids() == ["r1", "r2", "r0", "r3", "r4"], "in order of completion"
    assert (batch.totals.answers, batch.totals.prompt_tokens, batch.totals.generated_tokens) == (5, 15, 10)


async def test_a_refused_line_and_a_failed_request_are_answers(output: Path) -> None:
    failed = Response(400, "id", {"error": {"message": "n must be at least 1", "code": "invalid_value"}})
    endpoint = Endpoint(failed, OK)
    batch = Run(output, endpoint, [parse(1, b"nonsense"), *lines({}, {})])
    await batch.ended()
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["error"] and answer["error"]["code"] for answer in answers] == [
        "invalid_line",
        "invalid_value",
        None,
    ]
    assert answers[1]["error"]["message"] == "line 1: n must be at least 1"
    assert answers[1]["response"] == {"status_code": 400, "request_id": "id", "body": failed.body}
    assert (batch.totals.answers, batch.totals.failures) == (3, 2)


@pytest.mark.parametrize("trouble", [Response(503, "", {}), Response(429, "", {}, 0.0), Unreachable("refused")])
async def test_a_server_that_is_full_or_away_is_asked_again(output: Path, trouble: Response | Exception) -> None:
    endpoint = Endpoint(trouble, trouble, OK)
    batch = Run(output, endpoint, lines({}))
    await batch.ended()
    assert (batch.ids(), batch.totals.failures, endpoint.calls) == (["r0"], 0, 3)


@pytest.mark.parametrize("trouble", [Response(503, "", {"error": {"message": "no engine"}}), Unreachable("refused")])
async def test_a_server_that_stays_away_ends_the_run_without_an_answer(
    output: Path, trouble: Response | Exception
) -> None:
    endpoint = Endpoint(OK, *[trouble] * 9)
    batch = Run(output, endpoint, lines({}, {}, {}))
    with pytest.raises(Unreachable, match=r"no engine|refused"):
        await batch.ended()
    assert batch.ids() == ["r0"]


async def test_a_cancelled_run_keeps_its_answers_and_starts_no_more(output: Path) -> None:
    endpoint = Endpoint()
    batch = Run(output, endpoint, lines({}, {}, {}), window=2)
    await endpoint.until({0, 1})
    endpoint.finish(1)
    await endpoint.until({0, 2})
    batch.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch.ended()
    assert batch.ids() == ["r1"]
