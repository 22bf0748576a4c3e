"""Responses of /v1/chat/completions."""

from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar

from quire.v1 import gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.http.events import text_to_json, to_json
from services.gateway.http.openai import generation_output, logprobs, requests
from services.gateway.http.openai.dialect_deltas import DialectDeltas, message_of
from services.gateway.http.openai.dialect_use import DialectUse
from services.gateway.http.openai.generation_output import ChunkWriter, CollectedGeneration, GenerationCall
from services.gateway.http.openai.thought_tokens import ThoughtTokens
from services.gateway.http.openai.translation import CHAT_ID_PREFIX, chat_call
from services.gateway.request_handler import RequestHandler
from services.runtime.errors import UnsupportedField
from services.runtime.http.server_sent_events import Events

_CHUNK = "chat.completion.chunk"


class ChatCompletionCall(GenerationCall):
    """One request to /v1/chat/completions."""

    body: requests.ChatCompletionRequest
    id_prefix: ClassVar = CHAT_ID_PREFIX

    def __init__(self, handler: RequestHandler, origin: Origin, body: requests.ChatCompletionRequest) -> None:
        """Translate the body. Raises InvalidField or UnsupportedField."""
        super().__init__(handler, origin, body, chat_call(body, self.id_prefix))
        self._request = self.translated.generations[0]
        if body.stream and body.prompt_logprobs is not None:
            raise UnsupportedField("prompt_logprobs is not supported with stream", "prompt_logprobs")

    async def prompt_ids(self) -> list[int]:
        """Return the token ids of the prompt, of which there may be more than the context has. Raises ServiceError."""
        if self._request.HasField("truncate_prompt_tokens"):
            return await self.handler.prompt_ids(self._request, self.origin.caller)
        return await self.handler.token_ids(self._request.model, self._request.prompt, self.origin.caller)

    async def render(self) -> dict[str, Any]:
        """Return the token ids of the prompt, without a generation. Raises ServiceError."""
        self.prepare_tools()
        return await self.rendered(self._request)

    async def complete(self) -> dict[str, Any]:
        """Generate the complete response. Raises ServiceError."""
        self.prepare_tools()
        prompt_ids, in_thought = [], False
        if self.body.prompt_logprobs is not None:
            prompt_ids = await self.handler.prompt_ids(self._request, self.origin.caller)
            self._request.ClearField("truncate_prompt_tokens")
            self._request.prompt.token_ids.ids[:] = prompt_ids
            in_thought = self.tokenizer(self._request.model).dialect_tokens.open_thought(prompt_ids)
        collected = await generation_output.collect(self.generate(self._request))
        self.add_warnings(collected.started)
        collected.started.in_thought |= in_thought
        model = collected.started.model
        response = {
            **self.base_fields("chat.completion", model, collected.started.warnings),
            "choices": [self._choice(sample, collected) for sample in range(len(collected.samples))],
            "usage": generation_output.usage([collected.finished.usage], self.suffix.reasoning),
            **self.token_ids("prompt_token_ids", collected.started.prompt_token_ids),
        }
        if prompt_ids:
            prompt_scores = [None, *collected.prompt_logprobs]
            response["prompt_logprobs"] = logprobs.for_prompt(self.tokenizer(model), prompt_ids, prompt_scores)
        return response

    async def stream(self) -> Events:
        """Yield the chunks of the response, the first at the start of the generation. Raises ServiceError."""
        self.prepare_tools()
        writer = _ChatChunkWriter(self)
        async with aclosing(generation_output.stream_chunks(self.generate(self._request), writer)) as chunks:
            async for chunk in chunks:
                yield chunk
        for last in self.usage_chunk(_CHUNK, [writer]):
            yield last

    def new_deltas(self, started: gateway_pb2.Started) -> DialectDeltas | None:
        """Return what reads the output of one sample, None if it is text."""
        parser = self._use.parser(in_thought=started.in_thought)
        if parser is None:
            return None
        parallel, reasoning = self.body.parallel_tool_calls is not False, self.body.include_reasoning is not False
        tokens = ThoughtTokens(self.tokenizer(started.model), in_thought=started.in_thought) if parser.thinks else None
        on_finish = partial(self.handler.on_parsed, started.model)
        return DialectDeltas(parser, parallel=parallel, reasoning=reasoning, tokens=tokens, on_finish=on_finish)

    def prepare_tools(self) -> None:
        """Make the model call tools as `tool_choice` says, so that the parser finds the calls. Raises InvalidField."""
        self._use = DialectUse(self.body, self.tokenizer(self._request.model))
        if self._use.required:
            self.handler.check(self._request)  # while it has the fields that required calls ignore
        self._use.prepare(self._request)

    def add_warnings(self, started: gateway_pb2.Started) -> None:
        """Add what the gateway has left out of the request."""
        started.warnings.extend(self._use.warnings)

    def _choice(self, sample: int, collected: CollectedGeneration) -> dict[str, Any]:
        output = collected.samples[sample]
        deltas = self.new_deltas(collected.started)
        read = [*deltas.push(output.text, output.token_ids), *deltas.finish()] if deltas else [{"content": output.text}]
        message = message_of(read)
        self.suffix.add_reasoning(deltas.reasoning_tokens if deltas else 0)
        scores = None
        if self.body.logprobs:
            scores = logprobs.for_chat(self.tokenizer(collected.started.model), output.token_ids, output.logprobs)
        end = collected.finished.samples[sample]
        finish = generation_output.finish_fields(end, self.body, tool_called=deltas is not None and deltas.called)
        own = self.token_ids("token_ids", output.token_ids)
        return {"index": sample, "message": message, "logprobs": scores, **finish, **own}


class _ChatChunkWriter(ChunkWriter):
    def __init__(self, chat: ChatCompletionCall) -> None:
        super().__init__(chat, _CHUNK, "delta", b'},"logprobs":null,"finish_reason":null}]')
        self._chat = chat
        self._suffix.add_reasoning(0)
        self._deltas: list[DialectDeltas] = []
        self._is_continuous = self._suffix.is_continuous
        self._is_light = False  # chunks of dialects have deltas, and nothing else that changes
        self._reasoning = 0  # tokens of thoughts in the suffix
        self._details = bool(chat.body.logprobs or chat.body.return_token_ids)

    def write_started(self, started: gateway_pb2.Started, first: int = 0) -> bytes:
        """See ChunkWriter."""
        self._chat.add_warnings(started)
        super().write_started(started, first)
        self._content_prefixes = [before + b'{"content":' for before in self._prefixes]
        self._tokenizer = self._chat.tokenizer(started.model)
        self._deltas = [deltas for _ in self._prefixes if (deltas := self._chat.new_deltas(started)) is not None]
        self._is_light = bool(self._deltas) and not (self._details or self._is_continuous)
        prompt = self._chat.token_ids_part("prompt_token_ids", started.prompt_token_ids)
        opening = b'{"role":"assistant","content":""' + self._unfinished + prompt + self._suffix.value
        return b"".join([before + opening for before in self._prefixes])

    def write_delta(self, delta: gateway_pb2.Delta) -> bytes:
        """See ChunkWriter."""
        if self._is_light:
            return self._chunks(sample := delta.sample, self._deltas[sample].encode(delta.text, delta.token_ids))
        read = self._read(delta) if self._deltas else None
        super().write_delta(delta)
        if self._details:
            return self._detailed(delta, [_content(delta.text)] if read is None else read or [_content("")])
        if read is not None:
            return self._chunks(delta.sample, read)
        if not delta.text:
            return b""
        return self._content_prefixes[delta.sample] + text_to_json(delta.text).encode() + self._continuation

    def _write_finish(self, sample: int, end: gateway_pb2.SampleFinish) -> bytes:
        called, chunks = False, b""
        if self._deltas:
            deltas = self._deltas[sample]
            self._continuation = self._unfinished + self._suffix.value
            chunks = self._chunks(sample, deltas.encode_rest())
            self._count_reasoning()
            called = deltas.called
        return chunks + self._last_chunk(
            sample, b"{}", generation_output.finish_fields(end, self._chat.body, tool_called=called)
        )

    def _read(self, delta: gateway_pb2.Delta) -> list[bytes]:
        """Return the encoded deltas of new text, and count the tokens of thoughts if the chunks have their number."""
        read = self._deltas[delta.sample].encode(delta.text, delta.token_ids)
        if self._is_continuous:
            self._count_reasoning()
        return read

    def _count_reasoning(self) -> None:
        count = sum(one.reasoning_tokens for one in self._deltas)
        self._suffix.add_reasoning(count - self._reasoning)
        self._reasoning = count

    def _chunks(self, sample: int, deltas: list[bytes]) -> bytes:
        prefix, rest = self._prefixes[sample], self._continuation
        if len(deltas) == 1:
            return prefix + deltas[0] + rest
        return b"".join([prefix + one + rest for one in deltas])

    def _detailed(self, delta: gateway_pb2.Delta, deltas: list[bytes]) -> bytes:
        """Encode deltas. The first chunk has all log-probabilities and token ids, as far as they are requested."""
        scores = None
        if self._chat.body.logprobs:
            scores = logprobs.for_chat(self._tokenizer, delta.token_ids, delta.logprobs)
        own = self._chat.token_ids_part("token_ids", delta.token_ids)
        parts = (b'},"logprobs":', to_json(scores).encode(), b',"finish_reason":null', own, b"}]", self._suffix.value)
        first = b"".join([self._prefixes[delta.sample], deltas[0], *parts])
        return first + self._chunks(delta.sample, deltas[1:])


def _content(text: str) -> bytes:
    return b'{"content":' + text_to_json(text).encode()
