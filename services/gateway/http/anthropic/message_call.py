"""Responses of /v1/messages."""

from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from quire.v1 import gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.http.anthropic.chat_body import chat_body
from services.gateway.http.anthropic.content_blocks import BlockSeparator, OutputEvents, whole_blocks
from services.gateway.http.anthropic.conversation import MessageConversation
from services.gateway.http.anthropic.error_format import error_body
from services.gateway.http.anthropic.event_writer import MessageEventWriter, error_event
from services.gateway.http.anthropic.field_names import MessageFieldNames
from services.gateway.http.anthropic.message_object import MessageObject
from services.gateway.http.anthropic.request_schemas import MessageFields
from services.gateway.http.openai import generation_output
from services.gateway.http.openai.chats import ChatCompletionCall
from services.gateway.request_handler import RequestHandler, Responses
from services.runtime.http.server_sent_events import Events


class MessageCall(ChatCompletionCall):
    """One request to /v1/messages, generated as a chat."""

    id_prefix: ClassVar = "msg_"

    def __init__(
        self, handler: RequestHandler, origin: Origin, asked: MessageFields, conversation: MessageConversation
    ) -> None:
        """Translate the body. Raises InvalidField or UnsupportedField with a chat's names of the fields."""
        super().__init__(handler, origin, chat_body(asked, conversation))
        self._asked = asked
        names = MessageFieldNames.of(asked, conversation.origins, self.translated.field_names)
        self.translated = replace(self.translated, field_names=names)

    def generate(self, request: gateway_pb2.GenerateRequest) -> Responses:
        """Start the generation. Of a max_tokens beyond the context, what fits is generated."""
        return self.handler.generate(request, self.origin, caps_output=True)

    async def count_tokens(self) -> int:
        """Return the number of tokens of the prompt. Raises ServiceError."""
        return len(await self.prompt_ids())

    async def complete(self) -> dict[str, Any]:
        """Generate the complete response. Raises ServiceError."""
        self.prepare_tools()
        collected = await generation_output.collect(self.generate(self._request))
        (sample,) = collected.samples
        message, output, separator = self._parts(collected.started)
        events = [*output.read(sample.text, sample.token_ids), *output.rest()]
        content = whole_blocks([*separator.changes(events), *separator.close()])
        return message.finished(collected.finished, content, output)

    async def stream(self) -> Events:
        """Yield the events of the message, the first at its start. Raises the ServiceError of a rejection."""
        self.prepare_tools()
        writer: MessageEventWriter | None = None
        try:
            async with aclosing(self.generate(self._request)) as responses:
                async for response in responses:
                    if response.HasField("delta") and writer:
                        yield writer.write(response.delta)
                    elif response.HasField("started"):
                        writer = MessageEventWriter(*self._parts(response.started))
                        yield writer.start()
                    elif response.HasField("finished") and writer:
                        yield writer.finish(response.finished)
        except Exception as error:
            if writer is None:
                raise
            yield error_event(error_body(error, self.translated.field_names, self.translated.request_id))

    def _parts(self, started: gateway_pb2.Started) -> tuple[MessageObject, OutputEvents, BlockSeparator]:
        """Return what describes the message, what reads its output, and what separates it into blocks."""
        self.add_warnings(started)
        message = MessageObject(started, self.translated.request_id, self._asked.max_tokens or 0)
        thinking = self._asked.thinking
        separator = BlockSeparator(shows_thoughts=thinking is None or thinking.display != "omitted")
        return message, OutputEvents(self.new_deltas(started)), separator
