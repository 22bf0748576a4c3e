"""The client of OpenAI-compatible servers, against a scripted server."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web

from services.loadgen.clients.openai_client import OpenAIClient, events, retry_after_seconds, spread
from services.loadgen.clients.target import RequestFailed, Target, Unreachable
from services.loadgen.records import Record
from services.loadgen.workload.prompts import Kind, Piece, PromptMaker

pytestmark = pytest.mark.anyio

PROMPT = (Piece((Kind.UNIQUE, 0), 5),)
TOKENS = 6


class Server:
    """Streams two tokens a chunk, and ends as the body's field `way` requires."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "first", "max_model_len": 64}, {"id": "other"}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((body, dict(request.headers)))
        way = body.get("way", "")
        if way == "full":
            error = {"error": {"message": "the queue is full", "type": "overloaded"}}
            return web.json_response(error, status=429, headers={"Retry-After": "2.5"})
        if way == "slow":
            await asyncio.sleep(60)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(response, body, way)
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any], way: str) -> None:
        tokens = body.get("max_tokens") or body["max_completion_tokens"]
        for so_far in range(2, tokens + 2, 2):
            choice = {"delta": {"content": "a b"}} if "messages" in body else {"text": "a b"}
            chunk: dict[str, Any] = {"choices": [choice]}
            if way == "counted":
                chunk["usage"] = {"prompt_tokens": 5, "completion_tokens": min(so_far, tokens)}
            await self._send(response, chunk)
        if way == "broken":
            await self._send(response, {"error": {"message": "the engine is lost"}})
        if way == "nonsense":
            await response.write(b"data: {\r\n\r\n")
        if way in ("broken", "short", "nonsense"):
            return
        counted = 1 if way == "few" else tokens
        usage = {"prompt_tokens": 5, "completion_tokens": counted, "prompt_tokens_details": {"cached_tokens": 3}}
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n")


@asynccontextmanager
async def connected(
    server: Server, kind: str = "completions", model: str = "first", **more: Any
) -> AsyncIterator[OpenAIClient]:
    """Start the server, and yield a client of it with a clock that advances by a second a reading."""
    runner, moments = web.AppRunner(server.app(), handler_cancellation=True), itertools.count()
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        target = Target(kind, f"http://127.0.0.1:{runner.addresses[0][1]}", model, **more)
        client = OpenAIClient(target, PromptMaker(0, 1000), lambda: float(next(moments)))
        try:
            yield client
        finally:
            await client.close()
    finally:
        await runner.cleanup()


async def sent(way: str = "", **more: Any) -> tuple[Record, dict[str, Any], dict[str, str]]:
    """Send a request; return its record, and the received body and headers."""
    server, record = Server(), Record(0, 0, 5, TOKENS, 0.0)
    async with connected(server, extra_body={"way": way} if way else {}, **more) as client:
        await client.send(client.prepare(PROMPT, TOKENS), record)
    return record, *server.requests[0]


async def test_a_completion_sends_token_ids_and_its_tokens_are_spread_over_the_chunks() -> None:
    record, body, headers = await sent(api_key="sesame")
    assert record.counts.tolist() == [2, 2, 2]
    assert record.times.tolist() == [0.0, 1.0, 2.0]
    assert (record.usage.prompt_tokens, record.usage.cached_tokens, record.usage.output_tokens) == (5, 3, 6)
    assert body["prompt"] == PromptMaker(0, 1000).token_ids(PROMPT)
    assert {name: body[name] for name in body if name != "prompt"} == {
        "model": "first",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert headers["Authorization"] == "Bearer sesame"


async def test_a_chat_prompt_is_words() -> None:
    record, body, headers = await sent(kind="chat", ignore_eos=False, temperature=None)
    assert record.output_tokens == TOKENS
    assert body["max_completion_tokens"] == TOKENS
    assert [(one["role"], len(one["content"].split())) for one in body["messages"]] == [("user", 5)]
    assert not {"ignore_eos", "temperature", "prompt"} & set(body)
    assert "Authorization" not in headers


async def test_token_counts_of_the_servers_chunks_are_used() -> None:
    record, _, _ = await sent("counted")
    assert record.counts.tolist() == [2, 2, 2]


async def test_some_chunks_hold_no_token_if_there_are_more_chunks_than_tokens() -> None:
    record, _, _ = await sent("few")
    assert record.times.tolist() == [2.0]
    assert record.counts.tolist() == [1]


@pytest.mark.parametrize(
    ("way", "status", "message", "retry_after"),
    [
        ("full", "429", "the queue is full", 2.5),
        ("broken", "cut short", "the engine is lost", None),
        ("short", "cut short", "the stream ended without", None),
        ("nonsense", "cut short", "an event is not JSON", None),
        ("slow", "timeout", "no end within 0.2 seconds", None),
    ],
)
async def test_a_failed_request_has_its_status_and_reason(
    way: str, status: str, message: str, retry_after: float | None
) -> None:
    with pytest.raises(RequestFailed, match=message) as failed:
        await sent(way, timeout_seconds=0.2 if way == "slow" else 60)
    assert (failed.value.status, failed.value.retry_after) == (status, retry_after)


async def test_a_missing_server_is_unreachable() -> None:
    client = OpenAIClient(Target("chat", "http://127.0.0.1:9/v1"), PromptMaker(0, 1000), lambda: 0.0)
    try:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9/v1/models"):
            await client.describe()
        with pytest.raises(RequestFailed) as failed:
            await client.send(client.prepare(PROMPT, TOKENS), Record(0, 0, 5, TOKENS, 0.0))
        assert failed.value.status == "unreachable"
    finally:
        await client.close()


async def test_the_first_model_is_used_or_the_named_one_which_must_exist() -> None:
    async def describe(model: str) -> Any:
        async with connected(Server(), model=model) as client:
            return await client.describe()

    first = await describe("")
    assert (first.model, first.context_tokens) == ("first", 64)
    assert (await describe("other")).model == "other"
    with pytest.raises(Unreachable, match="no model 'third' among"):
        await describe("third")


@pytest.mark.parametrize("width", [1, 2, 3, 7, 1000])
async def test_events_are_read_from_pieces_of_any_size(width: int) -> None:
    body = b': hello\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'

    async def pieces() -> AsyncIterator[bytes]:
        for place in range(0, len(body), width):
            yield body[place : place + width]

    assert [event async for event in events(pieces())] == [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"[DONE]"]


def test_a_total_is_spread_evenly() -> None:
    assert spread(7, 3) == [2, 2, 3]
    assert spread(2, 4) == [0, 1, 0, 1]


def test_retry_after_is_read_in_seconds_or_as_a_date() -> None:
    assert retry_after_seconds({"Retry-After": "12"}) == 12.0
    later = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=30)
    before = (later - datetime.now(UTC)).total_seconds()
    delay = retry_after_seconds({"Retry-After": format_datetime(later, usegmt=True)})
    assert delay is not None
    assert before >= delay >= (later - datetime.now(UTC)).total_seconds()
    assert retry_after_seconds({}) is None
    assert retry_after_seconds({"Retry-After": "soon"}) is None
