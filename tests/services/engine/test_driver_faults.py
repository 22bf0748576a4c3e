"""An error in a request's outputs or reports ends at most this request, never the engine's thread."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConstraintFailed
from engine.run.loop import Turn
from engine.schedule.scheduler import IdleReason
from engine.schedule.sequence_group import Group
from engine.schedule.step_plan import Sampled
from quire.v1 import decoding_pb2, engine_pb2
from services.engine import driver as driver_module
from services.engine import gateway_requests
from services.engine.driver import EngineDriver
from services.engine.gateway_link import GatewayLink
from services.engine.gateway_requests import Arrival
from services.engine.observer import EngineObserver
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports
from services.runtime.tracing.spans import Tracing
from services.wire.requests import output
from tests.engine_in_process import ModelEngine

pytestmark = pytest.mark.anyio

GUILTY = "guilty"
TOKENS = 12


class Oops(Exception):
    """A bug in the engine's own code."""


class Driven:
    """A driver on its thread with a real model, an in-process block manager and one gateway's link."""

    def __init__(self, model: ModelEngine) -> None:
        self.model = model
        self.driver = EngineDriver(
            model.engine,
            frozenset({0}),
            5.0,
            EngineObserver(),
            RequestsRecorder(""),
            RequestReports("tiny", "engine", Tracing()),
        )
        self.link = GatewayLink()
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, engine_pb2.RequestFinished] = {}
        self.refused: dict[str, engine_pb2.RequestRefused] = {}
        self._thread = threading.Thread(target=self.driver.run)
        self._thread.start()

    def submit(self, request_id: str, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "prompt_token_ids": [20, 30, 40],
            "sampling": {"temperature": 0},
            "stopping": {"max_tokens": TOKENS, "ignore_eos": True},
        }
        submission = engine_pb2.Submission(request_id=request_id, attempt=1, **(defaults | fields))
        self.tokens[request_id] = []
        self.driver.submit(self.link, Arrival(submission, time.monotonic()))

    async def ends(self, *names: str) -> None:
        """Read until these requests have ended or were refused."""
        while not self.finished.keys() | self.refused.keys() >= set(names):
            if (step := await asyncio.wait_for(self.link.get(), 60)) is None:
                continue
            for one in step.tokens:
                self.tokens[one.request_id] += one.token_ids
            self.finished.update((one.request_id, one) for one in step.finished)
            self.refused.update((one.request_id, one) for one in step.refused)

    async def close(self) -> None:
        await self.driver.stop()
        self._thread.join(60)
        for _ in range(3):
            self.model.engine.turn()
        self.model.assert_released()


@asynccontextmanager
async def driving(folder: Path) -> AsyncIterator[Driven]:
    """Yield a driver, which must still serve afterwards and hold no block."""
    driven = Driven(ModelEngine(folder))
    try:
        yield driven
        driven.submit("next")
        await driven.ends("next")
        assert len(driven.tokens["next"]) == TOKENS
    finally:
        await driven.close()


@pytest.fixture
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def raising_for(patch: pytest.MonkeyPatch, place: Any, name: str, guilty: Callable[..., bool]) -> None:
    original = getattr(place, name)

    def faulty(*arguments: Any) -> Any:
        if guilty(*arguments):
            raise Oops("a bug")
        return original(*arguments)

    patch.setattr(place, name, faulty)


def is_guilty(group: Group, *_: object) -> bool:
    return group.request.request_id == GUILTY


async def all_end(driven: Driven, **fields: Any) -> engine_pb2.RequestFinished:
    """Return the end of the guilty request between two others, which must get the same tokens."""
    for name in ("before", GUILTY, "after"):
        driven.submit(name, **(fields if name == GUILTY else {}))
    await driven.ends("before", GUILTY, "after")
    for name in ("before", "after"):
        assert len(driven.tokens[name]) == TOKENS
        assert driven.finished[name].failure == engine_pb2.FAILURE_REASON_UNSPECIFIED
    assert driven.tokens["before"] == driven.tokens["after"]
    return driven.finished[GUILTY]


def has_failed(finished: engine_pb2.RequestFinished) -> bool:
    return finished.failure == engine_pb2.FAILURE_REASON_REQUEST and all(
        sample.reason == decoding_pb2.FINISH_REASON_FAILED for sample in finished.samples
    )


@pytest.mark.parametrize("max_tokens", [1, 9], ids=["last token", "earlier token"])
async def test_an_error_in_writing_tokens_fails_the_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    raised: list[bool] = []

    def first_of_the_guilty(tokens: list[Sampled]) -> bool:
        if raised or not any(len(token.top) == 13 for token in tokens):
            return False
        raised.append(True)
        return True

    raising_for(monkeypatch, output, "_token_logprobs", first_of_the_guilty)

    async with driving(folder) as driven:
        stopping = {"max_tokens": max_tokens, "ignore_eos": True}
        finished = await all_end(driven, logprobs=13, sampling={"sample_count": 2}, stopping=stopping)
        assert has_failed(finished)
        assert "Oops" in finished.detail
        assert driven.tokens[GUILTY] == [], "no token follows the missing one"
        assert driven.model.scheduler.totals.generated_tokens <= 2 * TOKENS + 2 * 2, "at most one more step is computed"


async def test_an_error_in_writing_the_end_fails_the_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising_for(monkeypatch, gateway_requests, "finished_message", is_guilty)

    async with driving(folder) as driven:
        assert has_failed(await all_end(driven, sampling={"sample_count": 2}))
        assert len(driven.finished[GUILTY].samples) == 2


@pytest.mark.parametrize(
    ("observer", "event", "is_faulty"),
    [
        (RequestReports, "on_queued", lambda _, submission, *__: submission.request_id == GUILTY),
        (RequestReports, "on_ended", lambda _, *rest: is_guilty(*rest)),
        (RequestsRecorder, "ended", lambda _, *rest: is_guilty(*rest)),
    ],
)
async def test_an_error_in_a_report_or_a_record_ends_no_request(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    observer: type,
    event: str,
    is_faulty: Callable[..., bool],
) -> None:
    raising_for(monkeypatch, observer, event, is_faulty)

    async with driving(folder) as driven:
        finished = await all_end(driven)
        assert finished.failure == engine_pb2.FAILURE_REASON_UNSPECIFIED
        assert driven.tokens[GUILTY] == driven.tokens["before"]


async def test_an_error_in_parsing_refuses_the_submission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising_for(monkeypatch, gateway_requests, "request_of", lambda submission, *_: submission.request_id == GUILTY)

    async with driving(folder) as driven:
        driven.submit("before")
        driven.submit(GUILTY)
        await driven.ends("before", GUILTY)
        assert driven.refused[GUILTY].reason == engine_pb2.REFUSAL_REASON_FAILED
        assert "Oops" in driven.refused[GUILTY].detail
        assert len(driven.tokens["before"]) == TOKENS


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (Oops("invalid character: \ud800"), engine_pb2.FAILURE_REASON_REQUEST),
        (ConstraintFailed("invalid character: \ud800"), engine_pb2.FAILURE_REASON_CONSTRAINT),
    ],
)
async def test_a_failure_with_an_invalid_message_is_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, failure: int
) -> None:
    # pytest-xdist cannot transfer the invalid character of the log.
    monkeypatch.setattr(driver_module.log, "disabled", True)
    turn = driver_module.Engine.turn

    def failing(engine: driver_module.Engine) -> Turn:
        if engine.scheduler.running > 2:
            engine.scheduler.requests.fail(GUILTY, error)
        return turn(engine)

    monkeypatch.setattr(driver_module.Engine, "turn", failing)

    async with driving(folder) as driven:
        finished = await all_end(driven)
        assert finished.failure == failure
        assert "invalid character: ?" in finished.detail


@pytest.mark.parametrize("drains", [True, False])
async def test_a_failed_engine_sends_no_ends_as_a_draining_one_does(folder: Path, drains: bool) -> None:
    driven = Driven(ModelEngine(folder))
    driven.submit("r", stopping={"max_tokens": 1900, "ignore_eos": True})
    steps = [await asyncio.wait_for(driven.link.get(), 60)]
    await (driven.driver.stop() if drains else driven.driver.abandon())
    driven.link.close()
    while not driven.link.closed:
        steps.append(await driven.link.get())
    ended = [one.request_id for step in steps if step for one in step.finished]
    assert ended == (["r"] if drains else [])


async def test_a_wake_up_that_is_lost_costs_a_second_and_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "_STALLED_SECONDS", 0.0)
    turn, idle_turns = driver_module.Engine.turn, iter(range(4))

    def forgetful(engine: driver_module.Engine) -> Turn:
        """Do nothing, as a scheduler does that has lost sight of its requests."""
        if engine.scheduler.running and next(idle_turns, None) is not None:
            return Turn([], progressed=False)
        return turn(engine)

    monkeypatch.setattr(driver_module.Engine, "turn", forgetful)

    async with driving(folder) as driven:
        driven.submit("r")
        await driven.ends("r")
        assert len(driven.tokens["r"]) == TOKENS
        assert driven.driver.stats.seconds_without_step == 0, "no request is live"
    assert {record.levelname for record in caplog.records} == {"WARNING", "ERROR"}
    assert "there was no step for" in caplog.records[0].message


async def test_the_time_without_a_step_counts_while_a_request_is_live(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "_MOST_IDLE_SECONDS", 0.01)
    turn, held = driver_module.Engine.turn, threading.Event()
    monkeypatch.setattr(
        driver_module.Engine,
        "turn",
        lambda engine: turn(engine) if held.is_set() else Turn([], progressed=False, idle=IdleReason.ANSWER),
    )
    async with driving(folder) as driven:
        driven.submit("r")
        while driven.driver.stats.seconds_without_step == 0:
            await asyncio.sleep(0.01)
        first = driven.driver.stats.seconds_without_step
        while driven.driver.stats.seconds_without_step == first:
            await asyncio.sleep(0.01)
        held.set()
        await driven.ends("r")
        assert driven.driver.stats.seconds_without_step == 0
