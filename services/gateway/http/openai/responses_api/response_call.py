"""One request to /v1/responses."""

import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import Any, ClassVar

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.http import error_responses
from services.gateway.http.openai import generation_output, logprobs, requests
from services.gateway.http.openai.chats import ChatCompletionCall
from services.gateway.http.openai.responses_api.event_writer import ResponseEventWriter
from services.gateway.http.openai.responses_api.input_items import InputConversation, InputFieldNames
from services.gateway.http.openai.responses_api.output_items import OutputItems, Scores
from services.gateway.http.openai.responses_api.request_schemas import ResponsesRequest, TextFormat
from services.gateway.http.openai.responses_api.response_object import ResponseObject, status_of_end
from services.gateway.http.openai.responses_api.response_tools import ResponseTools
from services.gateway.request_handler import RequestHandler
from services.runtime import statuses
from services.runtime.errors import InvalidField, ServiceError
from services.runtime.http.server_sent_events import Events

# OpenAI's codes of errors in a response; all others are `server_error`.
_CODES = {HTTPStatus.BAD_REQUEST: "invalid_prompt", HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded"}
_ID_BYTES = 8


class ResponseCall(ChatCompletionCall):
    """One request to /v1/responses, generated as a chat."""

    id_prefix: ClassVar = "resp_"

    def __init__(
        self,
        handler: RequestHandler,
        origin: Origin,
        asked: ResponsesRequest,
        conversation: InputConversation,
        tools: ResponseTools,
    ) -> None:
        """Translate the body. Raises InvalidField or UnsupportedField with a chat's names of the fields."""
        super().__init__(handler, origin, chat_body(asked, conversation, tools))
        self._asked = asked
        self._tools = tools
        self._warnings = [*tools.warnings, *conversation.warnings]
        names = InputFieldNames.of(conversation, tools, self.translated.field_names)
        self.translated = replace(self.translated, field_names=names)

    async def complete(self) -> dict[str, Any]:
        """Generate the complete response. Raises ServiceError."""
        self.prepare_tools()
        collected = await generation_output.collect(self.generate(self._request))
        (sample,), (end,) = collected.samples, collected.finished.samples
        items = self._new_items(collected.started)
        scores = self._scores(collected.started, sample.token_ids, sample.logprobs)
        items.push(sample.text, scores or (), sample.token_ids)
        items.finish(status_of_end(end))
        return self._response(collected.started).finished(collected.finished, items.items, items.reasoning_tokens)

    async def stream(self) -> Events:
        """Yield the events of the response, the first two at its start. Raises the ServiceError of a rejection."""
        self.prepare_tools()
        writer: ResponseEventWriter | None = None
        started = gateway_pb2.Started()
        try:
            async with aclosing(self.generate(self._request)) as responses:
                async for response in responses:
                    if response.HasField("started"):
                        started = response.started
                        writer = ResponseEventWriter(self._response(started), self._new_items(started))
                        yield writer.start()
                    elif writer and response.HasField("delta"):
                        delta = response.delta
                        scores = self._scores(started, delta.token_ids, delta.logprobs)
                        yield writer.write(delta.text, scores, delta.token_ids)
                    elif writer and response.HasField("finished"):
                        yield writer.finish(response.finished)
        except Exception as error:
            if writer is None:
                raise
            yield writer.fail(*self._failure(error))

    async def count_tokens(self) -> dict[str, Any]:
        """Count the tokens of the conversation and its tools, without a generation. Raises ServiceError."""
        return {"object": "response.input_tokens", "input_tokens": len(await self.prompt_ids())}

    def add_warnings(self, started: gateway_pb2.Started) -> None:
        """See ChatCompletionCall."""
        super().add_warnings(started)
        started.warnings.extend(self._warnings)

    def _new_items(self, started: gateway_pb2.Started) -> OutputItems:
        # Unlike the request's id, which a client may choose again, this differs in all turns of a conversation.
        name = secrets.token_hex(_ID_BYTES)
        encrypted = self._asked.wants_encrypted_thoughts
        return OutputItems(name, self.new_deltas(started), self._tools.by_name, encrypted_thoughts=encrypted)

    def _response(self, started: gateway_pb2.Started) -> ResponseObject:
        self.add_warnings(started)
        return ResponseObject(self._asked, started, self._created)

    def _scores(
        self, started: gateway_pb2.Started, token_ids: Sequence[int], scores: Sequence[decoding_pb2.TokenLogprobs]
    ) -> Scores | None:
        """Return the log-probabilities of tokens; None if they were not requested."""
        if not self._asked.wants_logprobs:
            return None
        content: Scores = logprobs.for_chat(self.tokenizer(started.model), token_ids, scores)["content"]
        return content

    def _failure(self, error: Exception) -> tuple[str, str]:
        """Return the code and the message of an error in mid-stream."""
        if not isinstance(error, ServiceError):
            return "server_error", error_responses.internal_error_body(error)["error"]["message"]
        code = _CODES.get(HTTPStatus(statuses.status_of(error).http), "server_error")
        return code, self.translated.field_names.named("", str(error))[1]


def chat_body(
    body: ResponsesRequest, conversation: InputConversation, tools: ResponseTools
) -> requests.ChatCompletionRequest:
    """Return the chat of a request. Raises InvalidField."""
    if body.top_logprobs and not body.wants_logprobs:
        message = "top_logprobs requires 'message.output_text.logprobs' in include"
        raise InvalidField(message, "top_logprobs")
    shared = {name: getattr(body, name) for name in requests.GenerationRequest.model_fields}
    chat = shared | {
        "messages": conversation.messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "tools": [tool.as_function() for tool in tools.offered],
        "tool_choice": tools.choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format) if body.text and body.text.format else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "stream_options": None,
    }
    return requests.ChatCompletionRequest.model_construct(**chat)


def _response_format(given: TextFormat) -> requests.ResponseFormat:
    has_schema, needs_schema = given.schema_ is not None, given.type == "json_schema"
    if has_schema != needs_schema:
        fault = "is missing" if needs_schema else "requires type 'json_schema'"
        raise InvalidField(f"text.format.schema {fault}", "text.format.schema")
    schema = {"name": given.name or "", "schema": given.schema_} if needs_schema else None
    return requests.ResponseFormat.model_validate({"type": given.type, "json_schema": schema})
