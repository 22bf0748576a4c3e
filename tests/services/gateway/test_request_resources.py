"""A request releases all its resources, wherever it is cancelled and whatever observers raise."""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import gateway_pb2
from services.gateway.fleet import prefix_lookup
from services.gateway.observe.observer import GatewayObserver, RequestObserver
from services.gateway.observe.observers import GatewayObservers
from tests.load import prompt_request
from tests.running.forwarder import Forwarder
from tests.running_quire import CALL_SECONDS
from tests.services.gateway.handler_in_process import ACME, HandlerInProcess, handler_in_process
from tests.services.gateway.observe.test_observers import Calls, methods

# Long enough to be tokenized in a thread, which is one of the awaits.
PROMPT = "Blocks of keys and values are kept like pages of memory. " * 75
TOKENS = 5
OnResponse = Callable[[gateway_pb2.GenerateResponse], None]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the prefix lookup on a machine of any speed, because it is one of the awaits."""
    monkeypatch.setattr(prefix_lookup, "_TIMEOUT_SECONDS", CALL_SECONDS)


def a_request() -> gateway_pb2.GenerateRequest:
    request = prompt_request(PROMPT, TOKENS)
    request.request_id = "r"
    request.timeout.FromSeconds(600)
    return request


async def answer(
    one: HandlerInProcess, request: gateway_pb2.GenerateRequest, on_response: OnResponse = lambda _: None
) -> list[str]:
    """Read a request's responses as a server does, which awaits each write; return their kinds."""
    kinds = []
    async with aclosing(one.handler.generate(request, ACME)) as responses:
        async for response in responses:
            kinds.append(response.WhichOneof("event"))
            on_response(response)
            await asyncio.sleep(0)
    return kinds


@types.coroutine
def suspended(work: Coroutine[Any, Any, Any], on_suspension: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Run a coroutine, and call `on_suspension` before each of its suspensions."""
    resume: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        try:
            awaited = resume(value)
        except StopIteration as end:
            return end.value
        on_suspension()
        try:
            resume, value = work.send, (yield awaited)
        except BaseException as error:
            resume, value = work.throw, error


async def cancelled_at(number: int, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Run a coroutine in a task that is cancelled at its suspension `number`, from 0; return the finished task."""
    count = 0

    def on_suspension() -> None:
        nonlocal count
        if count == number:
            task.cancel()
        count += 1

    async def run() -> Any:
        return await suspended(work, on_suspension)

    task = asyncio.create_task(run())
    await asyncio.gather(task, return_exceptions=True)
    return task


async def cancel_everywhere(
    one: HandlerInProcess, work: Callable[[], Coroutine[Any, Any, Any]], ready: Callable[[], Awaitable[None]]
) -> list[tuple[str, ...]]:
    """Cancel at each await in turn, and check after each; return the events of each request until then."""
    histories: list[tuple[str, ...]] = []
    while True:
        await ready()
        task = await cancelled_at(len(histories), work())
        await one.assert_nothing_held(task)
        if not task.cancelled():
            assert task.result()[-1] == "finished"
            assert one.events.names[-1] == "ended"
            return histories
        names = tuple(one.events.names)
        assert names[-1] in ("ended", "failed"), "observers receive the end"
        assert sum(name in ("ended", "failed") for name in names) == 1
        histories.append(names)


def test_cancellation_at_any_await_releases_all_resources(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    async def run() -> list[tuple[str, ...]]:
        async with handler_in_process(tmp_path, tiny_model("llama")) as one:
            return await cancel_everywhere(one, lambda: answer(one, a_request()), lambda: one.wait_for_engines(2))

    histories = asyncio.run(run())
    reached = {name for names in histories for name in names}
    reached.discard("ended")  # If one response has the last tokens and the end, there is no await between them.
    assert reached == {"admitted", "prepared", "submitted", "started", "tokens", "failed"}
    assert ("admitted", "failed") in histories, "while a thread tokenizes"
    assert ("admitted", "prepared", "failed") in histories, "during the prefix lookup"
    assert ("admitted", "prepared", "submitted", "failed") in histories, "before the engine starts it"


def test_cancellation_at_any_await_of_a_failover_releases_all_resources(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    def cut(forwarders: list[Forwarder]) -> None:
        for forwarder in forwarders:
            forwarder.cut()

    async def run(forwarders: list[Forwarder]) -> list[tuple[str, ...]]:
        places = tuple(forwarder.address for forwarder in forwarders)
        async with handler_in_process(tmp_path, tiny_model("llama"), through=places) as one:
            one.events.at_submission = lambda: cut(forwarders)
            histories = await cancel_everywhere(one, lambda: answer(one, a_request()), lambda: one.wait_for_engines(2))
            assert one.events.progress is not None
            assert one.events.progress.failovers > 0
            return histories

    with ExitStack() as stack:
        forwarders = [Forwarder(tmp_path / f"{name}.sock") for name in ("one", "two")]
        for forwarder in forwarders:
            stack.callback(forwarder.close)
        histories = asyncio.run(run(forwarders))
    lost = ("admitted", "prepared", "submitted", "failed")
    assert histories.count(lost) >= 3, "at the lost engine, without an engine, and while one is chosen"


def test_a_cancelled_request_ends_at_its_engine(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Without the cancellation the engine would continue for longer than this test waits."""

    async def run() -> None:
        async with handler_in_process(tmp_path, tiny_model("llama"), seconds_per_token=0.01) as one:
            task = await cancelled_at(4, answer(one, prompt_request("On and on", int(CALL_SECONDS / 0.01))))
            assert task.cancelled()
            assert "submitted" in one.events.names
            await one.assert_nothing_held(task)

    asyncio.run(run())


# Events of none of the requests below; observe/test_observers.py has them.
_OTHER_EVENTS = {"on_failover", "on_isolated", "on_given_up", "on_rejected", "on_inventory", "on_tenants"}
_OTHER_EVENTS |= {"on_http_request", "on_parsed"}


def test_observers_that_raise_change_no_request(
    tiny_model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, others, of_request, fault = GatewayObserver(), GatewayObserver(), RequestObserver(), RuntimeError("fault")
    called = {"on_request": Calls(first, "on_request", fault)}
    called |= {name: Calls(of_request, name, fault) for name in methods(RequestObserver)}
    called |= {name: Calls(others, name, fault) for name in methods(GatewayObserver) if name != "on_request"}
    others.on_request = lambda _: of_request  # type: ignore[method-assign]

    async def run() -> None:
        observers = GatewayObservers(first, others)
        async with handler_in_process(tmp_path, tiny_model("llama"), observers) as one:

            def cancel_as_slow(_: gateway_pb2.GenerateResponse) -> None:
                for stream in list(one.slow_clients._streams):
                    stream.cancel()

            for _ in range(2):
                task = asyncio.create_task(answer(one, a_request()))
                assert (await task)[-1] == "finished"
                assert one.events.names[:4] == ["admitted", "prepared", "submitted", "started"]
                assert one.events.names[-1] == "ended"
                await one.assert_nothing_held(task)
            late, invalid = a_request(), a_request()
            late.timeout.FromNanoseconds(1)
            invalid.logit_rules.allowed_token_ids.append(10**6)
            for at, work in (
                (10**6, answer(one, late)),
                (10**6, answer(one, invalid)),
                (10**6, answer(one, a_request(), cancel_as_slow)),
                (4, answer(one, a_request())),
            ):
                await one.assert_nothing_held(await cancelled_at(at, work))
                assert one.events.names[-1] == "failed"

    asyncio.run(run())
    assert {name for name, calls in called.items() if not calls.seen} == _OTHER_EVENTS
    failures = [record.getMessage() for record in caplog.records if "an observer failed" in record.getMessage()]
    assert len(failures) == len(called) - len(_OTHER_EVENTS), "each method is logged once"
