"""What a chat template renders, found by rendering short conversations."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from services.gateway.text.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateLimit, Conversation

# Some templates check the length of ids.
_ID = "call00001"
_NAME = "look_up_word"
_TEXT = "Quire probes this."
_PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Looks up.", "parameters": _PARAMETERS}}
_CALL = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": {"word": "page"}}}
_SYSTEM = {"role": "system", "content": "Be brief."}
_USER = {"role": "user", "content": "Hello."}
_ASSISTANT = {"role": "assistant", "content": "Hello, too."}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
# Clients choose the names of roles.
_MAX_ROLES = 64


class RoleTrial(NamedTuple):
    """What short conversations with a message of a role showed.

    `rendered`: a prompt has the message. `dropped`: prompts do not have it. Neither: there was none, for `reasons`.
    """

    rendered: bool = False
    dropped: bool = False
    reasons: frozenset[str] = frozenset()


class TemplateFeatures:
    """The features of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._roles: dict[str, RoleTrial] = {}
        self._exceeds_limits = False

    def find(self) -> None:
        """Find what is needed of every template, so that later reads do not wait for it."""
        _ = self.renders_tools, self.frame

    @cached_property
    def takes_parts(self) -> bool:
        """Whether texts are rendered as lists of parts only, as in templates of image-text models."""
        given = Conversation([{"role": "user", "content": _TEXT}], self._least_tools, open_turn=False)
        return _TEXT not in self._attempted(given) and _TEXT in self._attempted(_in_parts(given))

    def render(self, conversation: Conversation) -> str:
        """Return the prompt, with texts in the form that the template takes. Raises ChatTemplateError."""
        return self._template.render(_in_parts(conversation) if self.takes_parts else conversation)

    @cached_property
    def renders_tools(self) -> bool:
        """Whether descriptions of tools are part of a prompt."""
        return any(_NAME in self._rendered([*before, _USER], [_TOOL]) for before in ([], [_SYSTEM]))

    def attempted(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], open_turn: bool
    ) -> str:
        """Return a conversation as a prompt, empty if the template refuses it."""
        given = Conversation(messages, tools or self._least_tools, open_turn=open_turn)
        return self._attempted(_in_parts(given) if self.takes_parts else given)

    def renders_role(self, role: str) -> bool:
        """Return True if a prompt contains messages of this role, in some place of a conversation."""
        return self.role(role).rendered

    def role(self, role: str) -> RoleTrial:
        """Try a role. One that cannot be tried within the limits counts as rendered, as every other does then."""
        if self._exceeds_limits:
            return RoleTrial(rendered=True)
        if (known := self._roles.get(role)) is not None:
            return known
        try:
            trial = self._tried(role)
        except ChatTemplateLimit:  # not kept: what the chat itself needs counts, too
            return RoleTrial(rendered=True)
        if len(self._roles) >= _MAX_ROLES:
            self._roles.clear()
        self._roles[role] = trial
        return trial

    def _tried(self, role: str) -> RoleTrial:
        dropped, reasons = False, set[str]()
        for messages in _conversations(role):
            try:
                if _TEXT in self._template.render(self._short(messages)):
                    return RoleTrial(rendered=True)
                dropped = True
            except ChatTemplateLimit:
                raise
            except ChatTemplateError as error:
                reasons.add(str(error))
        return RoleTrial(dropped=dropped, reasons=frozenset(reasons))

    @cached_property
    def frame(self) -> str:
        """A short conversation as a prompt: mostly the texts that the template puts around messages."""
        return self._rendered([_USER, _ASSISTANT, _USER]) or self._rendered([_USER])

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        return self._attempted(self._short(messages, tools))

    def _short(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> Conversation:
        given = Conversation(messages, tools or self._least_tools, open_turn=False)
        return _in_parts(given) if self.takes_parts else given

    @property
    def _least_tools(self) -> Sequence[dict[str, Any]]:
        return [_TOOL] * self._template.needs_tools

    def _attempted(self, conversation: Conversation) -> str:
        if self._exceeds_limits:
            return ""
        try:
            return self._template.render(conversation)
        except ChatTemplateLimit:
            self._exceeds_limits = True
            return ""
        except ChatTemplateError:
            return ""


def _in_parts(conversation: Conversation) -> Conversation:
    """Return a conversation whose texts are lists of one part. An empty text is one too: templates read the first."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in conversation.messages
    ]
    return conversation._replace(messages=messages)


def _conversations(role: str) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with one message of the role, in places where templates allow one."""
    probe = {"role": role, "content": _TEXT, "tool_call_id": _ID, "name": _NAME}
    plain = {"role": role, "content": _TEXT}
    yield [plain]
    yield [plain, _USER]
    yield [_USER, plain]
    yield [_USER, _ASSISTANT, plain]
    yield [_USER, _CALLING, probe]
    yield [_USER, _CALLING, probe, _ASSISTANT]
