"""Maps the gateway's field paths to the field names of the HTTP API."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.http.openai.declared_fields import HTTP_NAMES

# Paths whose name in the HTTP API differs.
_NAMES = HTTP_NAMES | {
    "sampling": "",
    "logit_rules": "",
    "beam_search": "use_beam_search",
    "stopping": "",
    "thought": "thinking_token_budget",
    "output": "",
    "prompt.text": "prompt",
    "prompt.token_ids.ids": "prompt",
    "prompt.token_ids": "prompt",
    "prompt.chat.tools": "tools",
    "prompt.chat.template_variables": "chat_template_kwargs",
    "prompt.chat.add_generation_prompt": "add_generation_prompt",
    "prompt.chat.continue_final_message": "continue_final_message",
    "prompt.chat.messages": "messages",
    "prompt.chat": "messages",
    "token_ids": "tokens",
}
_PATH = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*(?:\[\d+\])?")
_NOT_A_WORD = re.compile(r"[._]")
_FIRST_WORD = re.compile(r"\A[a-z]+(?=:? )")
_OF_FUNCTION = re.compile(r"\b((?:tools|tool_calls)\[\d+\])\.(?=(?:name|description|parameters|arguments)\b)")
# The places of tools in a constraint on calls. A list of calls has the tools' schemas as definitions.
_IN_GRAMMAR = re.compile(r"constraint\.tool_calls(?:: |\.)tools\[(\d+)\]")
_OF_NAMED_TOOL = re.compile(r'constraint\.tool_calls: the parameters of ("(?:[^"\\]|\\.)*")')
_OF_ANSWER = re.compile(r"constraint\.tool_calls: answer: ")
_IN_CALLS_SCHEMA = re.compile(r"constraint\.json_schema: #/\$defs/(\d+)")
_FIELD = re.compile(r"prompt\.chat\.tools\[\d+\](?:\.\w+)?|constraint(?=: )")


@dataclass(frozen=True)
class ConstraintTools:
    """The tools in a constraint on calls: index in the request, and name."""

    tools: Sequence[tuple[int, str]]

    def locate(self, message: str) -> str:
        """Replace the place in the constraint, with which a message begins, by that in the request."""
        if found := _IN_GRAMMAR.match(message):
            return f"{self._tool(int(found[1]))}{message[found.end() :]}"
        if found := _OF_NAMED_TOOL.match(message):
            name = json.loads(found[1])  # the start of a long one
            at = next((at for at, (_, full) in enumerate(self.tools) if full.startswith(name)), None)
            return message if at is None else f"{self._tool(at)}.parameters{message[found.end() :]}"
        if found := _OF_ANSWER.match(message):
            return f"constraint: {message[found.end() :]}"
        if found := _IN_CALLS_SCHEMA.match(message):
            return f"{self._tool(int(found[1]))}.parameters: #{message[found.end() :]}"
        return message

    def _tool(self, at: int) -> str:
        return f"prompt.chat.tools[{self.tools[at][0]}]"


@dataclass(frozen=True)
class FieldNames:
    """The HTTP names of one request's fields. `overrides` are names that depend on the request."""

    overrides: dict[str, str] = field(default_factory=dict)
    constraint_tools: ConstraintTools | None = None

    def named(self, path: str, message: str) -> tuple[str, str]:
        """Return the field and the message of an error under their HTTP names."""
        if self.constraint_tools:
            message = self.constraint_tools.locate(message)
            path = found[0] if (found := _FIELD.match(message)) else path
        return self.http_name(path), self.translate(message)

    def http_name(self, path: str) -> str:
        """Return the HTTP name of a path, or the path itself if both are the same."""
        return _in_functions(_PATH.sub(lambda match: self._name(match[0]), path, count=1))

    def translate(self, message: str) -> str:
        """Replace all paths in a message by their HTTP names.

        A word alone, such as `output`, is not a path, except at the start if its name depends on the request.
        """
        message = _FIRST_WORD.sub(lambda match: self.overrides.get(match[0], match[0]), message, count=1)
        named = _PATH.sub(lambda match: self._name(match[0]) if _NOT_A_WORD.search(match[0]) else match[0], message)
        return _in_functions(named)

    def _name(self, path: str) -> str:
        names = _NAMES | self.overrides
        if path not in names and path.endswith("]"):
            path, bracket, index = path.partition("[")
            return self._name(path) + bracket + index
        for known in sorted(names, key=len, reverse=True):
            if path == known and names[known]:
                return names[known]
            if path.startswith(f"{known}."):
                return f"{names[known]}.{path.removeprefix(f'{known}.')}".removeprefix(".")
        return path


def _in_functions(text: str) -> str:
    """Name the fields of tools and calls as OpenAI nests them."""
    return _OF_FUNCTION.sub(r"\1.function.", text)
