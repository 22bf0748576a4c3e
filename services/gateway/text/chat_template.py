"""Renders conversations as prompts with the Jinja chat template of a model, in a process with limits."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from services.gateway.text.rendering.shares import RenderProcesses
from services.models.files.template_language import environment

# Variables that a template gets from the conversation or its environment; special tokens are others.
_OWN_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"))


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template does not accept the conversation.

    `field` is the path in the chat of the field at fault, empty for the conversation as a whole.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class ChatTemplateLimit(ChatTemplateError):
    """The template exceeds a limit of time, memory or output with the conversation."""


class Conversation(NamedTuple):
    """The input of a chat template, with the field names of Hugging Face Transformers.

    `messages` are in order, oldest first; each has a `role`, and `content` unless it has tool calls. `tools` are
    functions with a JSON schema. `variables` are further variables of the template. `open_turn` adds the start of the
    assistant's turn (`add_generation_prompt` in Transformers); `continue_final` leaves the turn of the last message
    open.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = MappingProxyType({})
    open_turn: bool = True
    continue_final: bool = False


class ChatTemplate:
    """A model's chat template. Renders the same text as Hugging Face Transformers.

    `source` is the Jinja text, None for a model without a template. `tool_source` replaces it for conversations with
    tools, if the model has a separate template for them. `special_tokens` are template variables such as `bos_token`.
    A rendering waits for others of the same template, and for a process: do not call it on the event loop. It raises
    FirstShareUsed in a block that gives it a share only.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self._source = source
        self._tool_source = source if tool_source is None else tool_source
        self._special_tokens = dict(special_tokens)
        sources = {"default": self._source, "tools": self._tool_source}
        self._processes = RenderProcesses({name: text for name, text in sources.items() if text is not None})

    @property
    def texts(self) -> tuple[str, ...]:
        """All that a rendering depends on beside the conversation, as texts."""
        return repr(self._source), repr(self._tool_source), repr(sorted(self._special_tokens.items()))

    @property
    def tool_source(self) -> str | None:
        """The Jinja text for conversations with tools; None for a model without a template."""
        return self._tool_source

    @property
    def needs_tools(self) -> bool:
        """Whether the only template is that for conversations with tools."""
        return self._source is None and self._tool_source is not None

    def names(self, word: str) -> bool:
        """Return True if the template has the word as a string, such as a role that it compares with."""
        texts = (self._source or "", self._tool_source or "")
        return any(quoted in text for text in texts for quoted in (f"'{word}'", f'"{word}"'))

    def names_member(self, name: str) -> bool:
        """Return True if the template reads members or variables of this name."""
        pattern = re.compile(rf"\b{re.escape(name)}\b")
        return any(pattern.search(text) for text in (self._source or "", self._tool_source or ""))

    def render(self, conversation: Conversation) -> str:
        """Return the prompt for a conversation; ignores `continue_final`. Raises ChatTemplateError."""
        if not conversation.messages:
            raise ChatTemplateError("A conversation must have at least one message.")
        self._check_variables(conversation.variables)
        variables = {
            "documents": None,
            **self._special_tokens,
            **conversation.variables,
            "messages": list(conversation.messages),
            "tools": list(conversation.tools) or None,
            "add_generation_prompt": conversation.open_turn,
        }
        return self._rendered("tools" if conversation.tools else "default", variables)

    def _rendered(self, name: str, variables: Mapping[str, Any]) -> str:
        if (self._tool_source if name == "tools" else self._source) is None:
            without = " for conversations without tools" if self.needs_tools else ""
            raise ChatTemplateError(f"The model has no chat template{without}.")
        answer = self._processes.render(name, variables)
        if answer.text is not None:
            return answer.text
        if answer.limit:
            raise ChatTemplateLimit(f"The chat template cannot render this conversation: {answer.reason}")
        raise ChatTemplateError(f"The chat template does not accept this conversation: {answer.reason}")

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name in _OWN_VARIABLES or name in self._special_tokens or name in environment().globals:
                raise ChatTemplateError("The chat template has its own value.", f".template_variables.{name}")
