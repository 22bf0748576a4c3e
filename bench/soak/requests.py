"""The mix of requests of a soak: for each kind, how it is built and with which statuses it may end."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp

from quire.v1 import gateway_pb2

CALL_SECONDS = 180.0
# While services are killed and stopped, clients may see these.
BROKEN = frozenset({"UNAVAILABLE", "503", "RESOURCE_EXHAUSTED", "429", "disconnected"})
_OK = BROKEN | {"OK", "200"}
_DEADLINE_SECONDS = 0.4
_TOPICS = ("a river", "the moon", "an old clock", "bread", "two friends", "a small town", "rain", "a library")
# Eight beginnings, which many requests share.
_PREFIXES = [
    f"You write about {one}. " + "Short sentences, plain words, no lists, and no headings. " * 6 for one in _TOPICS
]

# So many that prompts differ, and so few that the tokenizers' caches of words are full after a while.
_NUMBERS = 500
# Beyond the context of the demo model: refused by its size.
_TOO_LARGE = "a " * 500_000

Request = gateway_pb2.GenerateRequest


class GrpcKind(NamedTuple):
    """A kind of calls of Generate. `messages` is the number after which the client cancels."""

    name: str
    build: Callable[[random.Random], Request]
    statuses: frozenset[str] = _OK
    messages: int = 0
    timeout: float = CALL_SECONDS


class HttpKind(NamedTuple):
    """A kind of HTTP requests. `events` is the number of lines of a stream after which the client disconnects."""

    name: str
    path: str
    build: Callable[[random.Random], dict[str, Any]]
    statuses: frozenset[str] = _OK
    events: int = 0


def _text(draw: random.Random) -> str:
    return f"{draw.choice(_PREFIXES)} Number {draw.randrange(_NUMBERS)}."


def _request(draw: random.Random, most_tokens: int = 24) -> Request:
    request = Request()
    request.prompt.text = _text(draw)
    request.sampling.temperature, request.sampling.seed = draw.choice((0.0, 1.0)), draw.getrandbits(40)
    request.stopping.max_tokens = draw.randint(4, most_tokens)
    return request


def _chat(draw: random.Random) -> Request:
    request = _request(draw)
    request.prompt.chat.messages.add(role="system", content=draw.choice(_PREFIXES))
    request.prompt.chat.messages.add(role="user", content=f"Tell me number {draw.randrange(_NUMBERS)}.")
    return request


def _samples(draw: random.Random) -> Request:
    request = _request(draw)
    request.sampling.temperature, request.sampling.sample_count = 1.0, draw.randint(2, 4)
    request.output.logprobs = draw.choice((0, 2))
    return request


def _beams(draw: random.Random) -> Request:
    request = _request(draw, 12)
    request.sampling.Clear()
    request.beam_search.width = draw.randint(2, 4)
    return request


def _json_schema(draw: random.Random) -> Request:
    request = _request(draw)
    request.constraint.json_schema = json.dumps(_schema(draw))
    return request


def _regex(draw: random.Random) -> Request:
    request = _request(draw)
    request.constraint.regex = f"([a-z]{{2,8}} ){{2,6}}[0-9]{{{draw.randint(1, 40)}}}"
    return request


def _long(draw: random.Random) -> Request:
    request = _request(draw)
    request.stopping.max_tokens, request.stopping.ignore_eos = 400, True
    return request


def _invalid(draw: random.Random) -> Request:
    request = _request(draw)
    request.sampling.top_p = 2.0
    return request


def _schema(draw: random.Random) -> dict[str, Any]:
    """Make one of many schemas, so that compiled ones are evicted."""
    name = f"field_{draw.randrange(2000)}"
    return {"type": "object", "properties": {name: {"type": "integer"}, "end": {"type": "boolean"}}, "required": [name]}


def _http_chat(draw: random.Random, *, stream: bool = False, most_tokens: int = 24) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": draw.choice(_PREFIXES)},
        {"role": "user", "content": f"Tell me number {draw.randrange(_NUMBERS)}."},
    ]
    return {"model": "demo", "messages": messages, "max_tokens": draw.randint(4, most_tokens), "stream": stream}


def _http_stream(draw: random.Random) -> dict[str, Any]:
    return _http_chat(draw, stream=True) | {"stream_options": {"include_usage": True}}


def _http_long(draw: random.Random) -> dict[str, Any]:
    return _http_chat(draw, stream=True) | {"max_tokens": 400, "ignore_eos": True}


def _http_schema(draw: random.Random) -> dict[str, Any]:
    schema = {"name": "answer", "schema": _schema(draw)}
    return _http_chat(draw) | {"response_format": {"type": "json_schema", "json_schema": schema}}


def _completion(draw: random.Random) -> dict[str, Any]:
    return {"model": "demo", "prompt": _text(draw), "max_tokens": draw.randint(4, 24), "n": 2, "stop": ["\n\n"]}


GRPC_KINDS = (
    GrpcKind("grpc stream", _request),
    GrpcKind("grpc chat", _chat),
    GrpcKind("grpc samples", _samples),
    GrpcKind("grpc beams", _beams),
    GrpcKind("grpc json schema", _json_schema),
    GrpcKind("grpc regex", _regex),
    GrpcKind("grpc cancelled", _long, messages=6),
    GrpcKind("grpc past its deadline", _long, _OK | {"DEADLINE_EXCEEDED"}, timeout=_DEADLINE_SECONDS),
    GrpcKind("grpc invalid", _invalid, BROKEN | {"INVALID_ARGUMENT"}),
)
HTTP_KINDS = (
    HttpKind("http chat stream", "/v1/chat/completions", _http_stream),
    HttpKind("http chat", "/v1/chat/completions", _http_chat),
    HttpKind("http completion", "/v1/completions", _completion),
    HttpKind("http json schema", "/v1/chat/completions", _http_schema),
    HttpKind("http cancelled", "/v1/chat/completions", _http_long, events=6),
    HttpKind("http too large", "/v1/completions", lambda _: {"prompt": _TOO_LARGE}, BROKEN | {"400"}),
    HttpKind("http invalid", "/v1/chat/completions", lambda draw: _http_chat(draw) | {"top_p": 2}, BROKEN | {"400"}),
)


class RequestMix(NamedTuple):
    """The kinds of requests, and the mean pause between two of a worker."""

    grpc: tuple[GrpcKind, ...]
    http: tuple[HttpKind, ...]
    pause_seconds: float


MIXES = {
    "all": RequestMix(GRPC_KINDS, HTTP_KINDS, 0.25),
    # For engines that compute nothing, and follow no constraint.
    "unconstrained": RequestMix(
        tuple(one for one in GRPC_KINDS if one.name not in ("grpc json schema", "grpc regex")),
        tuple(one for one in HTTP_KINDS if one.name != "http json schema"),
        0.01,
    ),
}


async def grpc_status(stub: Any, kind: GrpcKind, draw: random.Random) -> str:
    """Run a call to its end or its cancellation. Raises grpc.aio.AioRpcError."""
    call = stub.Generate(kind.build(draw), timeout=kind.timeout)
    messages = 0
    async for _ in call:
        messages += 1
        if messages == kind.messages:
            call.cancel()
            return "OK"
    return "OK"


async def http_status(http: aiohttp.ClientSession, url: str, kind: HttpKind, draw: random.Random) -> tuple[str, str]:
    """Run a request to its end or its disconnection; return the status, and the text of an error."""
    timeout = aiohttp.ClientTimeout(CALL_SECONDS)
    try:
        async with http.post(f"{url}{kind.path}", json=kind.build(draw), timeout=timeout) as answer:
            if answer.status != 200:
                return str(answer.status), await answer.text()
            return await _read(answer, kind.events)
    except (aiohttp.ClientError, ConnectionError) as error:
        return "disconnected", str(error)
    except TimeoutError:
        return "timeout", ""


async def _read(answer: aiohttp.ClientResponse, events: int) -> tuple[str, str]:
    """Read an answer or its events; an error after the head is an event."""
    count = 0
    async for line in answer.content:
        if line.startswith(b'data: {"error"'):
            error = json.loads(line[6:])["error"]
            return str(error.get("code", "error")), str(error)
        count += line.startswith(b"data:")
        if events and count == events:
            answer.close()
            break
    return "200", ""
