"""Responses of /v1/chat/completions."""

import secrets
from contextlib import aclosing
from typing import Any, ClassVar

from quire.v1 import gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.http.events import to_json
from services.gateway.http.openai import generation_output, logprobs, requests
from services.gateway.http.openai.generation_output import ChunkWriter, CollectedGeneration, GenerationCall
from services.gateway.http.openai.tool_use import ToolUse
from services.gateway.http.openai.translation import CHAT_ID_PREFIX, chat_call
from services.gateway.request_handler import RequestHandler
from services.gateway.text.tool_calls import ArgumentsDelta, OutputPart, ToolCall, ToolCallParser, ToolCallStart
from services.runtime.errors import UnsupportedField
from services.runtime.http.server_sent_events import Events

_CHUNK = "chat.completion.chunk"
_ID_BYTES = 5  # Mistral's templates require ids of nine letters and digits


class ChatCompletionCall(GenerationCall):
    """One request to /v1/chat/completions."""

    body: requests.ChatCompletionRequest
    id_prefix: ClassVar = CHAT_ID_PREFIX

    def __init__(
        self, handler: RequestHandler, origin: Origin, body: requests.ChatCompletionRequest, request_id: str | None
    ) -> None:
        """Translate the body. Raises InvalidField or UnsupportedField."""
        super().__init__(handler, origin, body, chat_call(body, request_id, self.id_prefix))
        self._request = self.translated.generations[0]
        if body.stream and body.prompt_logprobs is not None:
            raise UnsupportedField("prompt_logprobs is not supported with stream", "prompt_logprobs")

    async def complete(self) -> dict[str, Any]:
        """Generate the complete response. Raises ServiceError."""
        self.prepare_tools()
        prompt_ids = []
        if self.body.prompt_logprobs is not None:
            prompt_ids = await self.handler.prompt_ids(self._request, self.origin.caller)
            self._request.ClearField("truncate_prompt_tokens")
            self._request.prompt.token_ids.ids[:] = prompt_ids
        collected = await generation_output.collect(self.generate(self._request))
        model = collected.started.model
        response = {
            **self.base_fields("chat.completion", model, collected.started.warnings),
            "choices": [self._choice(sample, collected) for sample in range(len(collected.samples))],
            "usage": generation_output.usage([collected.finished.usage]),
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

    def tool_call_parser(self) -> ToolCallParser | None:
        """Return a new parser for one sample, or None if the model cannot call tools."""
        return self._tool_use().parser()

    def prepare_tools(self) -> None:
        """Make the model call tools as `tool_choice` says, so that the parser finds the calls. Raises InvalidField."""
        use = self._tool_use()
        if use.required:
            self.handler.check(self._request)  # while it has the fields that required calls ignore
        use.prepare(self._request)

    def _tool_use(self) -> ToolUse:
        return ToolUse(self.body, self.tokenizer(self._request.model))

    def _choice(self, sample: int, collected: CollectedGeneration) -> dict[str, Any]:
        output = collected.samples[sample]
        message, calls = self._message(output.text)
        scores = None
        if self.body.logprobs:
            scores = logprobs.for_chat(self.tokenizer(collected.started.model), output.token_ids, output.logprobs)
        end = collected.finished.samples[sample]
        finish = generation_output.finish_fields(end, self.body, tool_called=bool(calls))
        own = self.token_ids("token_ids", output.token_ids)
        return {"index": sample, "message": message, "logprobs": scores, **finish, **own}

    def _message(self, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        parser = self.tool_call_parser()
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if parser is None:
            return message, []
        deltas = CallDeltas(parser, parallel=self.body.parallel_tool_calls is not False)
        content, calls = _merge_deltas(deltas.push(text) + deltas.finish())
        message["content"] = content if content or not calls else None
        return (message | {"tool_calls": calls} if calls else message), calls


class CallDeltas:
    """Converts the text of one sample to OpenAI's deltas of content and tool calls."""

    def __init__(self, parser: ToolCallParser, *, parallel: bool) -> None:
        """With `parallel` False, calls after the first are dropped."""
        self._parser = parser
        self._parallel = parallel
        self.calls = 0

    def push(self, text: str) -> list[dict[str, Any]]:
        """Add generated text; return the deltas that are final."""
        return self._deltas(self._parser.push(text))

    def finish(self) -> list[dict[str, Any]]:
        """Return the deltas held back after the last push."""
        return self._deltas(self._parser.finish())

    def _deltas(self, pieces: list[OutputPart]) -> list[dict[str, Any]]:
        deltas = [self._delta(piece) for piece in pieces]
        return [delta for delta in deltas if delta]

    def _delta(self, piece: OutputPart) -> dict[str, Any]:
        if isinstance(piece, ArgumentsDelta):
            return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": piece.text}}]}
        if not isinstance(piece, ToolCall | ToolCallStart):
            return {"content": piece}
        if self.calls and not self._parallel:
            return {}
        self.calls += 1
        arguments = piece.arguments if isinstance(piece, ToolCall) else ""
        function = {"name": piece.name, "arguments": arguments}
        return {"tool_calls": [{"index": self.calls - 1, "id": _call_id(), "type": "function", "function": function}]}


class _ChatChunkWriter(ChunkWriter):
    def __init__(self, chat: ChatCompletionCall) -> None:
        super().__init__(chat, _CHUNK, "delta", b'},"logprobs":null,"finish_reason":null}]')
        self._chat = chat
        self._calls: list[CallDeltas] = []

    def write_started(self, started: gateway_pb2.Started, first: int = 0) -> bytes:
        """See ChunkWriter."""
        super().write_started(started, first)
        self._content_prefixes = [before + b'{"content":' for before in self._prefixes]
        self._tokenizer, parallel = self._chat.tokenizer(started.model), self._chat.body.parallel_tool_calls
        parsers = [parser for _ in self._prefixes if (parser := self._chat.tool_call_parser()) is not None]
        self._calls = [CallDeltas(one, parallel=parallel is not False) for one in parsers]
        prompt = self._chat.token_ids_part("prompt_token_ids", started.prompt_token_ids)
        opening = b'{"role":"assistant","content":""' + self._unfinished + prompt + self._suffix.value
        return b"".join([before + opening for before in self._prefixes])

    def write_delta(self, delta: gateway_pb2.Delta) -> bytes:
        """See ChunkWriter."""
        super().write_delta(delta)
        if self._calls or self._chat.body.logprobs or self._chat.body.return_token_ids:
            return self._delta_chunks(delta)
        if not delta.text:
            return b""
        return self._content_prefixes[delta.sample] + to_json(delta.text).encode() + self._continuation

    def _write_finish(self, sample: int, end: gateway_pb2.SampleFinish) -> bytes:
        called, chunks = False, b""
        if self._calls:
            calls = self._calls[sample]
            chunks = b"".join([self._chunk(sample, delta) for delta in calls.finish()])
            called = calls.calls > 0
        return chunks + self._last_chunk(
            sample, b"{}", generation_output.finish_fields(end, self._chat.body, tool_called=called)
        )

    def _delta_chunks(self, delta: gateway_pb2.Delta) -> bytes:
        """Encode a delta with tool calls, log-probabilities or token ids. The first chunk has all of the latter two."""
        body, scores = self._chat.body, None
        deltas = self._calls[delta.sample].push(delta.text) if self._calls else [{"content": delta.text}]
        if body.logprobs:
            scores = logprobs.for_chat(self._tokenizer, delta.token_ids, delta.logprobs)
        if body.logprobs or body.return_token_ids:
            deltas = deltas or [{"content": ""}]
        own = self._chat.token_ids_part("token_ids", delta.token_ids)
        first = [self._chunk(delta.sample, one, scores, own) for one in deltas[:1]]
        return b"".join([*first, *(self._chunk(delta.sample, one) for one in deltas[1:])])

    def _chunk(
        self, sample: int, delta: dict[str, Any], scores: dict[str, Any] | None = None, own: bytes = b""
    ) -> bytes:
        parts = (to_json(delta).encode(), b',"logprobs":', to_json(scores).encode(), b',"finish_reason":null', own)
        return b"".join([self._prefixes[sample], *parts, b"}]", self._suffix.value])


def _merge_deltas(deltas: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the complete content and tool calls of a list of deltas."""
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            index = call.pop("index")
            if index < len(calls):
                calls[index]["function"]["arguments"] += call["function"]["arguments"]
            else:
                calls.append(call)
    return content, calls


def _call_id() -> str:
    return secrets.token_hex(_ID_BYTES)[:9]
