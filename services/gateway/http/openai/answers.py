"""What all answers have in common: a generation gathered to its end, how it ended, and what it took."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.http.events import to_json
from services.gateway.http.openai import requests
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.http.server_sent_events import Events

Responses = AsyncGenerator[gateway_pb2.GenerateResponse, None]

_FINISH_REASONS = {decoding_pb2.FINISH_REASON_STOP: "stop", decoding_pb2.FINISH_REASON_LENGTH: "length"}


class Desk(Protocol):
    """What HTTP needs of the gateway. Everything raises a ServiceError."""

    def generate(self, request: gateway_pb2.GenerateRequest, origin: Origin) -> Responses:
        """Yield what the client gets; closed early, it ends the request."""

    async def token_ids(self, model: str, prompt: gateway_pb2.Prompt, *, open_turn: bool = True) -> list[int]:
        """Return the token ids of a prompt."""

    async def text(self, request: gateway_pb2.DetokenizeRequest) -> str:
        """Return the text of token ids."""

    def tokenizer(self, model: str) -> Tokenizer:
        """Return the tokenizer of a served model."""

    def models(self) -> list[gateway_pb2.GetModelResponse]:
        """Describe the models that an engine is there for."""

    def model(self, name: str) -> gateway_pb2.GetModelResponse:
        """Describe a served model."""


@dataclass
class Sample:
    """All that one sample said."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[decoding_pb2.TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self.pieces)

    def add(self, delta: gateway_pb2.Delta) -> None:
        """Take what it said next."""
        self.pieces.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)


@dataclass
class Gathered:
    """A generation that has ended."""

    samples: list[Sample]
    started: gateway_pb2.Started
    finished: gateway_pb2.Finished
    prompt_logprobs: list[decoding_pb2.TokenLogprobs]


class Chunks(Protocol):
    """Makes events of what one generation says; empty bytes are none."""

    def opened(self, started: gateway_pb2.Started) -> bytes:
        """The generation began."""

    def said(self, delta: gateway_pb2.Delta) -> bytes:
        """A sample went on."""

    def ended(self, finished: gateway_pb2.Finished) -> bytes:
        """The generation ended."""


async def chunked(responses: Responses, chunks: Chunks) -> Events:
    """Yield the events of one generation, the first when it begins. Raises the ServiceError that it ends with."""
    async with aclosing(responses):
        async for response in responses:
            match response.WhichOneof("event"):
                case "delta":
                    yield chunks.said(response.delta)
                case "started":
                    yield chunks.opened(response.started)
                case "finished":
                    yield chunks.ended(response.finished)


async def gather(responses: Responses) -> Gathered:
    """Read a generation to its end. Raises the ServiceError that it ends with."""
    samples: dict[int, Sample] = {}
    gathered = Gathered([], gateway_pb2.Started(), gateway_pb2.Finished(), [])
    async with aclosing(responses):
        async for response in responses:
            match response.WhichOneof("event"):
                case "started":
                    gathered.started = response.started
                case "prompt_logprobs":
                    gathered.prompt_logprobs.extend(response.prompt_logprobs.logprobs)
                case "delta":
                    samples.setdefault(response.delta.sample, Sample()).add(response.delta)
                case "finished":
                    gathered.finished = response.finished
    gathered.samples = [samples.get(at, Sample()) for at in range(len(gathered.finished.samples))]
    return gathered


async def gather_all(generations: Sequence[Responses]) -> list[Gathered]:
    """Read several generations side by side. The first error ends all of them."""
    reading: list[Coroutine[Any, Any, Gathered]] = [gather(one) for one in generations]
    if len(reading) == 1:
        return [await reading[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in reading]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


def ending(end: gateway_pb2.SampleFinish, *, called: bool = False) -> dict[str, Any]:
    """Return how a sample ended: OpenAI's word for it, and what it ran into, as vLLM tells it. `called`: a tool."""
    reason = _FINISH_REASONS[end.reason]
    matched = end.WhichOneof("matched")
    return {
        "finish_reason": "tool_calls" if called and reason == "stop" else reason,
        "stop_reason": getattr(end, matched) if matched else None,
    }


def includes_usage(body: requests.Generation) -> bool:
    """Whether a stream ends with the tokens counted."""
    return bool(body.stream_options and body.stream_options.include_usage)


class ChunkEnd:
    """What each chunk of a generation ends with: its tokens so far, where asked for."""

    def __init__(self, body: requests.Generation) -> None:
        options = body.stream_options
        asked = bool(options and options.include_usage)
        self._counted = gateway_pb2.Usage() if asked and options and options.continuous_usage_stats else None
        self.written = b',"usage":null}\n\n' if asked else b"}\n\n"

    def opened(self, started: gateway_pb2.Started) -> None:
        """Take the prompt's tokens."""
        if self._counted is not None:
            self._counted.prompt_tokens, self._counted.cached_tokens = started.prompt_tokens, started.cached_tokens
            self._write(self._counted)

    def said(self, delta: gateway_pb2.Delta) -> bool:
        """Take the tokens of a delta; return whether that changed what is written."""
        if self._counted is None:
            return False
        self._counted.generated_tokens += len(delta.token_ids)
        self._write(self._counted)
        return True

    def _write(self, counted: gateway_pb2.Usage) -> None:
        self.written = b',"usage":%b}\n\n' % to_json(usage([counted])).encode()


def usage(counted: Iterable[gateway_pb2.Usage]) -> dict[str, Any]:
    """Return the tokens of one or more generations."""
    each = list(counted)
    prompt = sum(one.prompt_tokens for one in each)
    completion = sum(one.generated_tokens for one in each)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in each)},
    }
