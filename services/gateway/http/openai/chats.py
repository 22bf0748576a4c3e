"""Answers of /v1/chat/completions."""

import secrets
from contextlib import aclosing
from typing import Any

from quire.v1 import gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.http.events import to_json
from services.gateway.http.openai import answers, logprobs, requests
from services.gateway.http.openai.answers import Chunks, Gathered, GenerationCall
from services.gateway.http.openai.translation import chat_call
from services.gateway.request_handler import RequestHandler
from services.gateway.text.tool_calls import (
    ArgumentsDelta,
    ArgumentsParser,
    CallListParser,
    Piece,
    ToolCall,
    ToolCallParser,
    ToolCallStart,
    ToolFormat,
    parser_for,
)
from services.runtime.errors import UnsupportedField
from services.runtime.http.server_sent_events import Events

_CHUNK = "chat.completion.chunk"
_ID_BYTES = 5  # Mistral's templates want ids of nine letters and digits


class ChatCompletionCall(GenerationCall):
    """One call of /v1/chat/completions."""

    body: requests.ChatCompletionRequest

    def __init__(
        self, handler: RequestHandler, origin: Origin, body: requests.ChatCompletionRequest, request_id: str | None
    ) -> None:
        """Translate the body. Raises InvalidField or UnsupportedField."""
        super().__init__(handler, origin, body, chat_call(body, request_id))
        self._request = self.translated.generations[0]
        if body.stream and body.prompt_logprobs is not None:
            raise UnsupportedField("prompt_logprobs is not served for streams", "prompt_logprobs")

    async def whole(self) -> dict[str, Any]:
        """Generate everything, and return the answer. Raises a ServiceError."""
        self._show_calls()
        prompt_ids = []
        if self.body.prompt_logprobs is not None:
            prompt_ids = await self.handler.token_ids(self._request.model, self._request.prompt)
            self._request.prompt.token_ids.ids[:] = prompt_ids
        gathered = await answers.gather(self.generate(self._request))
        model = gathered.started.model
        answer = {
            **self.head("chat.completion", model),
            "choices": [self._choice(sample, gathered) for sample in range(len(gathered.samples))],
            "usage": answers.usage([gathered.finished.usage]),
        }
        if prompt_ids:
            its = [None, *gathered.prompt_logprobs]
            answer["prompt_logprobs"] = logprobs.of_prompt(self.tokenizer(model), prompt_ids, its)
        return answer

    async def events(self) -> Events:
        """Yield the answer as it comes, the first when it begins. Raises a ServiceError."""
        self._show_calls()
        chunks = _ChatChunks(self)
        async with aclosing(answers.chunked(self.generate(self._request), chunks)) as stream:
            async for one in stream:
                yield one
        for last in self.usage_chunk(_CHUNK, [chunks]):
            yield last

    def reader(self) -> ToolCallParser | None:
        """Make what finds calls in one sample; None where there can be none."""
        body = self.body
        if not body.tools or body.tool_choice == "none":
            return None
        if isinstance(body.tool_choice, requests.NamedTool):
            return ArgumentsParser(body.tool_choice.function.name)
        return CallListParser() if body.tool_choice == "required" else parser_for(self._format())

    def _format(self) -> ToolFormat:
        return ToolFormat.of(self.tokenizer(self._request.model).chat_template.tool_source or "")

    def _show_calls(self) -> None:
        """Keep the special tokens that begin a call in the text."""
        if self.body.tools and self.body.tool_choice in (None, "auto"):
            tokenizer = self.tokenizer(self._request.model)
            if tokenizer.is_special_token(self._format().mark):
                self._request.output.special_tokens = True

    def _choice(self, sample: int, gathered: Gathered) -> dict[str, Any]:
        said = gathered.samples[sample]
        message, calls = self._message(said.text)
        scores = None
        if self.body.logprobs:
            scores = logprobs.of_chat(self.tokenizer(gathered.started.model), said.token_ids, said.logprobs)
        ending = answers.ending(gathered.finished.samples[sample], called=bool(calls))
        return {"index": sample, "message": message, "logprobs": scores, **ending}

    def _message(self, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        reader = self.reader()
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reader is None:
            return message, []
        deltas = CallDeltas(reader, parallel=self.body.parallel_tool_calls is not False)
        content, calls = _joined(deltas.push(text) + deltas.finish())
        message["content"] = content if content or not calls else None
        return (message | {"tool_calls": calls} if calls else message), calls


class CallDeltas:
    """What a sample says, in the shape of a stream's deltas: content and calls."""

    def __init__(self, reader: ToolCallParser, *, parallel: bool) -> None:
        """Not `parallel`: calls after the first are left out."""
        self._reader = reader
        self._parallel = parallel
        self.calls = 0

    def push(self, text: str) -> list[dict[str, Any]]:
        """Take more text; return what it comes to."""
        return self._deltas(self._reader.push(text))

    def finish(self) -> list[dict[str, Any]]:
        """Return what was held back."""
        return self._deltas(self._reader.finish())

    def _deltas(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        deltas = [self._delta(piece) for piece in pieces]
        return [delta for delta in deltas if delta]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, ArgumentsDelta):
            return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": piece.text}}]}
        if not isinstance(piece, ToolCall | ToolCallStart):
            return {"content": piece}
        if self.calls and not self._parallel:
            return {}
        self.calls += 1
        arguments = piece.arguments if isinstance(piece, ToolCall) else ""
        function = {"name": piece.name, "arguments": arguments}
        return {"tool_calls": [{"index": self.calls - 1, "id": _id(), "type": "function", "function": function}]}


class _ChatChunks(Chunks):
    """Events of one chat's answers."""

    def __init__(self, chat: ChatCompletionCall) -> None:
        super().__init__(chat, _CHUNK, "delta", b'},"logprobs":null,"finish_reason":null}]')
        self._chat = chat
        self._calls: list[CallDeltas] = []

    def opened(self, started: gateway_pb2.Started, first: int = 0) -> bytes:
        """See Chunks."""
        super().opened(started, first)
        self._before_text = [before + b'{"content":' for before in self._before]
        self._tokenizer, parallel = self._chat.tokenizer(started.model), self._chat.body.parallel_tool_calls
        readers = [reader for _ in self._before if (reader := self._chat.reader()) is not None]
        self._calls = [CallDeltas(one, parallel=parallel is not False) for one in readers]
        opening = b'{"role":"assistant","content":""' + self._going_on
        return b"".join([before + opening for before in self._before])

    def said(self, delta: gateway_pb2.Delta) -> bytes:
        """See Chunks."""
        super().said(delta)
        if self._calls or self._chat.body.logprobs:
            return self._said_with_more(delta)
        if not delta.text:
            return b""
        return self._before_text[delta.sample] + to_json(delta.text).encode() + self._going_on

    def _ending(self, sample: int, end: gateway_pb2.SampleFinish) -> bytes:
        called, chunks = False, b""
        if self._calls:
            calls = self._calls[sample]
            chunks = b"".join([self._chunk(sample, delta, None) for delta in calls.finish()])
            called = calls.calls > 0
        return chunks + self._last(sample, b"{}", answers.ending(end, called=called))

    def _said_with_more(self, delta: gateway_pb2.Delta) -> bytes:
        """Return chunks of calls and log-probabilities; these come with the first of the chunks."""
        deltas = self._calls[delta.sample].push(delta.text) if self._calls else [{"content": delta.text}]
        scores = None
        if self._chat.body.logprobs:
            scores = logprobs.of_chat(self._tokenizer, delta.token_ids, delta.logprobs)
            deltas = deltas or [{"content": ""}]
        chunks = [self._chunk(delta.sample, one, None if at else scores) for at, one in enumerate(deltas)]
        return b"".join(chunks)

    def _chunk(self, sample: int, delta: dict[str, Any], scores: dict[str, Any] | None) -> bytes:
        parts = (to_json(delta).encode(), b',"logprobs":', to_json(scores).encode(), b',"finish_reason":null}]')
        return b"".join([self._before[sample], *parts, self._end.written])


def _joined(deltas: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the content and the calls that deltas come to."""
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


def _id() -> str:
    return secrets.token_hex(_ID_BYTES)[:9]
