"""The output of generations as response bodies and chunks, shared by completions and chats."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
class CollectedSample:
    """The complete output of one sample."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[decoding_pb2.TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the sample."""
        return "".join(self.pieces)

    def add(self, delta: gateway_pb2.Delta) -> None:
        """Append a delta."""
        self.pieces.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)


@dataclass
class CollectedGeneration:
    """The complete output of one generation."""

    samples: list[CollectedSample]
    started: gateway_pb2.Started
    finished: gateway_pb2.Finished
    prompt_logprobs: list[decoding_pb2.TokenLogprobs]


class GenerationCall:
    """One HTTP request that generates; base of completions and chats."""

    def __init__(
        self, handler: RequestHandler, origin: Origin, body: requests.GenerationRequest, translated: TranslatedCall
    ) -> None:
        self.translated = translated
        self.body = body
        self.handler = handler
        self.origin = origin
        self._created = int(time.time())
        self.suffix = ChunkSuffix(body)

    def base_fields(self, kind: str, model: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
        """Return the fields that the response and each of its chunks start with."""
        fields = {"id": self.translated.request_id, "object": kind, "created": self._created, "model": model}
        return fields | {"warnings": list(warnings)} if warnings else fields

    def generate(self, request: gateway_pb2.GenerateRequest) -> Responses:
        """Start the generation of one prompt."""
        return self.handler.generate(request, self.origin)

    async def rendered(self, request: gateway_pb2.GenerateRequest) -> dict[str, Any]:
        """Return the token ids of one prompt, without a generation. Raises ServiceError."""
        token_ids = await self.handler.rendered(request, self.origin.caller)
        model = self.handler.model(request.model).model
        return {"request_id": request.request_id, "model": model, "token_ids": token_ids}

    def tokenizer(self, model: str) -> Tokenizer:
        """Return the tokenizer of a served model."""
        return self.handler.tokenizer(model)

    def token_ids(self, name: str, token_ids: Iterable[int]) -> dict[str, list[int]]:
        """Return the field `name` with token ids, if the client requested them."""
        return {name: list(token_ids)} if self.body.return_token_ids else {}

    def token_ids_part(self, name: str, token_ids: Iterable[int]) -> bytes:
        """Encode `token_ids` as a field after others in an object."""
        return b',"%b":%b' % (name.encode(), to_json(list(token_ids)).encode()) if self.body.return_token_ids else b""

    def usage_chunk(self, kind: str, writers: Sequence["ChunkWriter"]) -> Iterator[bytes]:
        """Yield the chunk with the usage after the last choice, if the client requested it."""
        if self.body.stream_options and self.body.stream_options.include_usage:
            total = usage((writer.usage for writer in writers), self.suffix.reasoning)
            yield event({**self.base_fields(kind, writers[0].model), "choices": [], "usage": total})


class ChunkSuffix:
    """The bytes that end each chunk. They include the usage so far if the client requested it.

    It counts all choices of all prompts together, so that no count falls from one chunk to the next. The last counts
    are those of the response.
    """

    def __init__(self, body: requests.GenerationRequest) -> None:
        options = body.stream_options
        include = bool(options and options.include_usage)
        self._usage = gateway_pb2.Usage() if include and options and options.continuous_usage_stats else None
        self.reasoning: int | None = None  # tokens in thoughts; None for completions
        self.value = b',"usage":null}\n\n' if include else b"}\n\n"

    @property
    def is_continuous(self) -> bool:
        """Whether chunks have the usage so far."""
        return self._usage is not None

    def add_prompt_usage(self, started: gateway_pb2.Started) -> None:
        """Add the tokens of a prompt."""
        if self._usage is not None:
            self._usage.prompt_tokens += started.prompt_tokens
            self._usage.cached_tokens += started.cached_tokens
            self._write(self._usage)

    def add_usage(self, delta: gateway_pb2.Delta) -> bool:
        """Add the tokens of a delta; return True if `value` changed."""
        if self._usage is None:
            return False
        self._usage.generated_tokens += len(delta.token_ids)
        self._write(self._usage)
        return True

    def add_reasoning(self, count: int) -> None:
        """Add tokens of thoughts."""
        self.reasoning = (self.reasoning or 0) + count
        if count and self._usage is not None:
            self._write(self._usage)

    def _write(self, counted: gateway_pb2.Usage) -> None:
        self.value = b',"usage":%b}\n\n' % to_json(usage([counted], self.reasoning)).encode()


class ChunkWriter(ABC):
    """Encodes the events of one generation as chunks. Empty bytes mean no chunk.

    A chunk is sent for each token, so its constant parts are encoded once: a prefix for each sample, up to the key
    `content_key` of its choice, and `unfinished`, the rest of a choice without finish reason.
    """

    def __init__(self, call: GenerationCall, kind: str, content_key: str, unfinished: bytes) -> None:
        self.model = ""
        self.usage = gateway_pb2.Usage()
        self._call = call
        self._kind = kind
        self._content_key = content_key
        self._unfinished = unfinished
        self._suffix = call.suffix

    def write_started(self, started: gateway_pb2.Started, first: int = 0) -> bytes:
        """Encode the start of the generation. The indices of its choices begin at `first`."""
        self.model, count = started.model, started.sampling.sample_count
        base = to_json(self._call.base_fields(self._kind, started.model, started.warnings))[:-1]
        self._prefixes = [
            f'data: {base},"choices":[{{"index":{first + sample},"{self._content_key}":'.encode()
            for sample in range(count)
        ]
        self._suffix.add_prompt_usage(started)
        self._continuation = self._unfinished + self._suffix.value
        return b""

    def write_prompt_scores(self, _part: gateway_pb2.PromptLogprobs, /) -> bytes:
        """Encode the log-probabilities of a part of the prompt."""
        return b""

    def write_delta(self, delta: gateway_pb2.Delta) -> bytes:
        """Encode the next tokens of one sample."""
        if self._suffix.add_usage(delta):
            self._continuation = self._unfinished + self._suffix.value
        return b""

    def write_finished(self, finished: gateway_pb2.Finished) -> bytes:
        """Encode the end of the generation."""
        self.usage = finished.usage
        return b"".join(self._write_finish(sample, end) for sample, end in enumerate(finished.samples))

    @abstractmethod
    def _write_finish(self, sample: int, end: gateway_pb2.SampleFinish) -> bytes:
        """Encode the end of one sample."""

    def _last_chunk(self, sample: int, empty_content: bytes, finish: Mapping[str, Any]) -> bytes:
        parts = (empty_content, b',"logprobs":null,', to_json(finish)[1:-1].encode(), b"}]", self._suffix.value)
        return b"".join([self._prefixes[sample], *parts])


async def stream_chunks(responses: Responses, writer: ChunkWriter) -> Events:
    """Yield the chunks of one generation, the first at its start. Raises the ServiceError that ends it."""
    async with aclosing(responses):
        async for response in responses:
            match response.WhichOneof("event"):
                case "delta":
                    yield writer.write_delta(response.delta)
                case "started":
                    yield writer.write_started(response.started)
                case "prompt_logprobs":
                    yield writer.write_prompt_scores(response.prompt_logprobs)
                case "finished":
                    yield writer.write_finished(response.finished)


async def collect(responses: Responses) -> CollectedGeneration:
    """Read a generation to its end. Raises the ServiceError that ends it."""
    samples: dict[int, CollectedSample] = {}
    collected = CollectedGeneration([], gateway_pb2.Started(), gateway_pb2.Finished(), [])
    async with aclosing(responses):
        async for response in responses:
            match response.WhichOneof("event"):
                case "started":
                    collected.started = response.started
                case "prompt_logprobs":
                    collected.prompt_logprobs.extend(response.prompt_logprobs.logprobs)
                case "delta":
                    samples.setdefault(response.delta.sample, CollectedSample()).add(response.delta)
                case "finished":
                    collected.finished = response.finished
    collected.samples = [samples.get(at, CollectedSample()) for at in range(len(collected.finished.samples))]
    return collected


async def collect_all(generations: Sequence[Responses]) -> list[CollectedGeneration]:
    """Read several generations concurrently. The first error ends all of them."""
    if len(generations) == 1:
        return [await collect(generations[0])]
    tasks = [asyncio.ensure_future(collect(one)) for one in generations]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The error of a task has this frame in its traceback: a cycle, which would keep all prompts.
        del task, tasks


def finish_fields(
    end: gateway_pb2.SampleFinish, body: requests.GenerationRequest, *, tool_called: bool = False
) -> dict[str, Any]:
    """Return `finish_reason` as OpenAI has it, and `stop_reason` as vLLM has it."""
    reason = _FINISH_REASONS[end.reason]
    return {
        "finish_reason": "tool_calls" if tool_called and reason == "stop" else reason,
        "stop_reason": _stop_reason(end, body.stop_token_ids or ()),
    }


def _stop_reason(end: gateway_pb2.SampleFinish, stop_token_ids: Sequence[int]) -> str | int | None:
    """Return the stop string or stop token that the client gave; None for the model's end-of-sequence token."""
    if end.WhichOneof("matched") == "stop_string":
        return end.stop_string
    return end.stop_token_id if end.HasField("stop_token_id") and end.stop_token_id in stop_token_ids else None


def usage(generations: Iterable[gateway_pb2.Usage], reasoning: int | None = None) -> dict[str, Any]:
    """Return the token counts of one or more generations, summed. `reasoning` is the number of those in thoughts."""
    each = list(generations)
    prompt = sum(one.prompt_tokens for one in each)
    completion = sum(one.generated_tokens for one in each)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in each)},
        **({} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}),
    }
