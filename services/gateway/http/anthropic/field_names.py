"""The names of the fields of /v1/messages, in errors of the chat that is made of its body."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.http.anthropic.request_schemas import MessageFields
from services.gateway.http.message_origins import MessageOrigin, place_of
from services.gateway.http.openai.field_names import FieldNames

_IN_MESSAGE = re.compile(
    r"\bmessages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function\b)?|(\.content\b))?(\.arguments\b)?"
)
_IN_TOOL = re.compile(r"\b(tools\[\d+\])\.function\b(\.parameters\b)?")
_NAMES = {
    "prompt.chat": "messages",
    "prompt.chat.messages": "messages",
    "stopping.max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stopping.stop_strings": "stop_sequences",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "tool_choice.function": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


@dataclass(frozen=True)
class MessageFieldNames(FieldNames):
    """The names of one request's fields: those of a chat, with the place of each message in the body."""

    origins: Sequence[MessageOrigin] = ()

    @classmethod
    def of(cls, body: MessageFields, origins: Sequence[MessageOrigin], names: FieldNames) -> "MessageFieldNames":
        """Return the names of a request; `names` are those of its chat."""
        format_name = "output_format" if body.output_format else "output_config.format"
        own = _NAMES | {
            "response_format.json_schema.schema": f"{format_name}.schema",
            "response_format.json_schema": format_name,
            "response_format": format_name,
        }
        if body.thinking and body.thinking.budget_tokens is not None:
            own |= dict.fromkeys(("thought", "thought.max_tokens", "thinking_token_budget"), "thinking.budget_tokens")
        renamed = {path: own.get(name, name) for path, name in names.overrides.items()}
        return cls({**renamed, **own}, names.constraint_tools, origins)

    def http_name(self, path: str) -> str:
        """See FieldNames."""
        return self._in_body(super().http_name(path))

    def translate(self, message: str) -> str:
        """See FieldNames."""
        return self._in_body(super().translate(message))

    def _in_body(self, text: str) -> str:
        named = _IN_TOOL.sub(lambda tool: tool[1] + ".input_schema" * bool(tool[2]), text)
        return _IN_MESSAGE.sub(self._place, named)

    def _place(self, match: re.Match[str]) -> str:
        *place, arguments = match.groups()
        found = place_of(self.origins, *place)
        return found + ".input" * bool(arguments) if found else match[0]
