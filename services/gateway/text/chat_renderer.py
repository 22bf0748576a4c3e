"""Renders clients' conversations with a chat template, and adapts them to what the template renders."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from services.gateway.dialects.declarations import DEFAULT_CALLS
from services.gateway.dialects.dialect import CallFormat, Dialect
from services.gateway.dialects.probe import THOUGHT_KEYS, dialect_of, written_calls
from services.gateway.dialects.selection import UNSELECTED, DialectSelection
from services.gateway.text.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateLimit, Conversation
from services.gateway.text.template_features import TemplateFeatures
from services.gateway.text.tool_prompt import has_tools, with_description, with_tool_prompt

# Marks the end of the message to continue. The space shows whether the template strips messages.
UNKNOWN = Dialect()
_END = "\ufdd0end\ufdd0"
_END_AND_SPACE = f"{_END} "


class ChatRenderer:
    """Renders conversations as the prompts of one model.

    A template that renders no tools gets them as plain messages; a developer is the system for one without that role.
    One that renders texts only in parts gets parts.
    """

    def __init__(self, template: ChatTemplate, selection: DialectSelection = UNSELECTED) -> None:
        self._template = template
        self._selection = selection
        self.features = TemplateFeatures(template)

    @cached_property
    def dialect(self) -> Dialect:
        """The dialect of the model: selected, or that of its template. Calls are None for a form that is not known."""
        selection = self._selection
        found = UNKNOWN if selection.is_whole else dialect_of(self.features.attempted, self._template.tool_source or "")
        if not found.channels and not self.features.renders_tools:
            found = replace(found, calls=self._written_calls or DEFAULT_CALLS)  # the description of tools teaches them
        return selection.applied_to(found)

    @cached_property
    def _written_calls(self) -> CallFormat | None:
        """The known format in which the template writes calls, though it may not describe tools."""
        return written_calls(self.features.attempted)

    def knows(self, role: str) -> bool:
        """Return True if the role is a usual one, or one that the template names."""
        return role in ("system", "user", "assistant", "tool", "developer") or self._template.names(role)

    def render(self, conversation: Conversation) -> str:
        """Return the prompt. Raises ChatTemplateError."""
        adapted = self._adapted(conversation)
        try:
            text = self._rendered(adapted)
        except ChatTemplateLimit:
            raise
        except ChatTemplateError as error:
            if (simpler := _without_thoughts_beside_content(adapted)) is not None:
                with suppress(ChatTemplateError):
                    return self._rendered(simpler)
            if self.features.renders_role("user"):  # else the template renders nothing at all
                self._check_roles(conversation, str(error))
                self._check_arguments(conversation, error)
            raise
        self._check_roles(conversation)
        return text

    def _rendered(self, conversation: Conversation) -> str:
        if not conversation.continue_final:
            return self.features.render(conversation)
        *messages, last = conversation.messages
        marked = [*messages, {**last, "content": last["content"] + _END_AND_SPACE}]
        text = self.features.render(conversation._replace(messages=marked, open_turn=False))
        before, end, after = text.rpartition(_END)
        if not end:
            raise ChatTemplateError("The chat template does not render the last message.", ".continue_final_message")
        return before if after.startswith(" ") else before.rstrip()

    def _adapted(self, conversation: Conversation) -> Conversation:
        messages = [self._named(message) for message in conversation.messages]
        adapted = conversation._replace(messages=messages)
        if self.features.renders_tools or not has_tools(conversation):
            return adapted
        system_role = self.features.renders_role("system")
        if self._written_calls is not None:
            return with_description(adapted, self._written_calls, system_role=system_role)
        return with_tool_prompt(adapted, self.dialect.calls or DEFAULT_CALLS, system_role=system_role)

    def _named(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with the role, and the names of its thought, that the template has."""
        named = {**message, "role": self._role(message["role"])}
        if thought := named.pop("reasoning", None):
            named |= dict.fromkeys(filter(self._template.names_member, THOUGHT_KEYS), thought)
        return named

    def _role(self, given: str) -> str:
        return "system" if given == "developer" and not self._template.names(given) else given

    def _check_roles(self, conversation: Conversation, reason: str = "") -> None:
        """Raise ChatTemplateError for the first message whose role the template does not render.

        `reason` is why there is no prompt: a role is at fault if the template drops it, or refuses it for that reason.
        """
        for at, message in enumerate(conversation.messages):
            role = self._role(message["role"])
            if role == "tool" and not self.features.renders_tools and self._written_calls is None:
                continue  # rendered as a turn of the user
            trial = self.features.role(role)
            if trial.dropped or reason in trial.reasons:
                fault = f"The chat template does not render the role {role!r}{'; ' * bool(reason)}{reason}"
                raise ChatTemplateError(fault, f".messages[{at}].role")

    def _check_arguments(self, conversation: Conversation, error: ChatTemplateError) -> None:
        """Raise ChatTemplateError for the first arguments that are no object, if the template renders objects there."""
        at = next(_other_arguments(conversation.messages), None)
        if at is None:
            return
        try:
            self._rendered(self._adapted(conversation._replace(messages=_with_objects(conversation.messages))))
        except ChatTemplateError:
            return  # the arguments are not at fault
        field = f".messages[{at[0]}].tool_calls[{at[1]}].arguments"
        raise ChatTemplateError(f"The chat template does not render arguments that are no JSON object; {error}", field)


def _without_thoughts_beside_content(conversation: Conversation) -> Conversation | None:
    """Return a conversation without the thoughts of messages that have content and calls; None if it has no such one.

    Some templates, such as that of gpt-oss, refuse such messages. The content is what the user saw.
    """
    messages = [dict(message) for message in conversation.messages]
    both = [one for one in messages if one.get("tool_calls") and one.get("content") and one.keys() & set(THOUGHT_KEYS)]
    for message in both:
        for key in THOUGHT_KEYS:
            message.pop(key, None)
    return conversation._replace(messages=messages) if both else None


def _other_arguments(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yield the places, by message and call, of arguments that are no object."""
    for at, message in enumerate(messages):
        for place, call in enumerate(message.get("tool_calls", ())):
            if not isinstance(call["function"]["arguments"], dict):
                yield at, place


def _with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with empty objects for arguments that are no object."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    object_of = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": {**call["function"], "arguments": object_of}}
