"""What all answers have in common: a generation gathered to its end, how it ended, and what it took."""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.http.events import event, to_json
from services.gateway.http.openai import requests
from services.gateway.http.openai.translation import TranslatedCall
from services.gateway.request_handler import RequestHandler, Responses
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.http.server_sent_events import Events

_FINISH_REASONS = {decoding_pb2.FINISH_REASON_STOP: "stop", decoding_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass
class GatheredSample:
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

    samples: list[GatheredSample]
    started: gateway_pb2.Started
    finished: gateway_pb2.Finished
    prompt_logprobs: list[decoding_pb2.TokenLogprobs]


class GenerationCall:
    """A call of HTTP that generates, and what every message of its answer has."""

    def __init__(
        self, handler: RequestHandler, origin: Origin, body: requests.GenerationRequest, translated: TranslatedCall
    ) -> None:
        self.translated = translated
        self.body = body
        self.handler = handler
        self._origin = origin
        self._created = int(time.time())

    def head(self, kind: str, model: str) -> dict[str, Any]:
        """Return what every message of the answer begins with."""
        return {"id": self.translated.name, "object": kind, "created": self._created, "model": model}

    def generate(self, request: gateway_pb2.GenerateRequest) -> Responses:
        """Generate for one of its prompts."""
        return self.handler.generate(request, self._origin)

    def tokenizer(self, model: str) -> Tokenizer:
        """Return the tokenizer of a served model."""
        return self.handler.tokenizer(model)

    def usage_chunk(self, kind: str, chunks: Sequence["Chunks"]) -> Iterator[bytes]:
        """Yield the chunk after the last one, if the tokens counted are asked for."""
        if self.body.stream_options and self.body.stream_options.include_usage:
            counted = usage(one.usage for one in chunks)
            yield event({**self.head(kind, chunks[0].model), "choices": [], "usage": counted})


class ChunkEnd:
    """What each chunk of a generation ends with: its tokens so far, where asked for."""

    def __init__(self, body: requests.GenerationRequest) -> None:
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


class Chunks:
    """Makes events of what one generation sends; empty bytes are none.

    What comes with every token is written beforehand, but for the text: behind the key `opening` of its choice, and
    before `going_on`, which says that nothing ends yet.
    """

    def __init__(self, call: GenerationCall, kind: str, opening: str, going_on: bytes) -> None:
        self.model = ""
        self.usage = gateway_pb2.Usage()
        self._call = call
        self._kind = kind
        self._opening = opening
        self._not_ended = going_on
        self._end = ChunkEnd(call.body)

    def opened(self, started: gateway_pb2.Started, first: int = 0) -> bytes:
        """The generation began; its samples are numbered from `first` on."""
        self.model, count = started.model, started.sampling.sample_count
        head = to_json(self._call.head(self._kind, started.model))[:-1]
        self._before = [
            f'data: {head},"choices":[{{"index":{first + sample},"{self._opening}":'.encode() for sample in range(count)
        ]
        self._end.opened(started)
        self._going_on = self._not_ended + self._end.written
        return b""

    def said(self, delta: gateway_pb2.Delta) -> bytes:
        """A sample went on."""
        if self._end.said(delta):
            self._going_on = self._not_ended + self._end.written
        return b""

    def ended(self, finished: gateway_pb2.Finished) -> bytes:
        """The generation ended."""
        self.usage = finished.usage
        return b"".join(self._ending(sample, end) for sample, end in enumerate(finished.samples))

    def _ending(self, sample: int, end: gateway_pb2.SampleFinish) -> bytes:
        raise NotImplementedError

    def _last(self, sample: int, nothing: bytes, how: Mapping[str, Any]) -> bytes:
        """Return a sample's last chunk, with `nothing` for text."""
        parts = (nothing, b',"logprobs":null,', to_json(how)[1:-1].encode(), b"}]", self._end.written)
        return b"".join([self._before[sample], *parts])


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
    samples: dict[int, GatheredSample] = {}
    gathered = Gathered([], gateway_pb2.Started(), gateway_pb2.Finished(), [])
    async with aclosing(responses):
        async for response in responses:
            match response.WhichOneof("event"):
                case "started":
                    gathered.started = response.started
                case "prompt_logprobs":
                    gathered.prompt_logprobs.extend(response.prompt_logprobs.logprobs)
                case "delta":
                    samples.setdefault(response.delta.sample, GatheredSample()).add(response.delta)
                case "finished":
                    gathered.finished = response.finished
    gathered.samples = [samples.get(at, GatheredSample()) for at in range(len(gathered.finished.samples))]
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
    """Return how a sample ended: OpenAI's word for it, and what it ran into, as vLLM has it. `called`: a tool."""
    reason = _FINISH_REASONS[end.reason]
    matched = end.WhichOneof("matched")
    return {
        "finish_reason": "tool_calls" if called and reason == "stop" else reason,
        "stop_reason": getattr(end, matched) if matched else None,
    }


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
