"""Groups the messages of a conversation into turns: what one author says before the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.gateway.http.anthropic.block_schemas import RedactedThinkingBlock, TextBlock, ThinkingBlock, ToolUseBlock
from services.gateway.http.anthropic.request_schemas import ContextManagement, KeptTurns, Message
from services.gateway.http.thought_carrier import thought_of
from services.runtime.errors import InvalidField


class SystemText(NamedTuple):
    """The text of a message of the system in a turn of the user."""

    text: str


_TEXTS = (TextBlock, SystemText)
_THOUGHTS = (ThinkingBlock, RedactedThinkingBlock)


@dataclass
class Turn:
    """Messages of one author behind each other: their blocks, with the place of each in the body."""

    role: str
    path: str
    blocks: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The texts of the turn."""
        return [block.text for block, _ in self.blocks if isinstance(block, _TEXTS)]

    @property
    def thoughts(self) -> list[str]:
        """The thoughts of the turn."""
        blocks = [block for block, _ in self.blocks if isinstance(block, ThinkingBlock)]
        return [text for block in blocks if (text := block.thinking or thought_of(block.signature))]

    @property
    def calls(self) -> list[tuple[ToolUseBlock, str]]:
        """The calls of the turn, with their places."""
        return [(block, path) for block, path in self.blocks if isinstance(block, ToolUseBlock)]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is said in it."""
        is_plain = all(isinstance(block, (*_TEXTS, *_THOUGHTS)) for block, _ in self.blocks)
        return is_plain and not any((*self.texts, *self.thoughts))


def leading_system_texts(messages: Sequence[Message]) -> list[str]:
    """Return the texts of the messages of the system before any other: one for each. Raises InvalidField."""
    first = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    return [_system_text(message, f"messages[{at}]") for at, message in enumerate(messages[:first])]


def turns_of(messages: Sequence[Message], first: int) -> list[Turn]:
    """Return the turns of a conversation from a message on. Raises InvalidField.

    A message of the system is a part of the user's turn, because most chat templates have its role only at the start.
    """
    turns: list[Turn] = []
    for at, message in enumerate(messages[first:], first):
        role = "user" if message.role == "system" else message.role
        if not turns or turns[-1].role != role:
            turns.append(Turn(role, f"messages[{at}]"))
        turns[-1].blocks += _blocks(message, f"messages[{at}]")
    return turns


def clear_thoughts(turns: Sequence[Turn], management: ContextManagement | None) -> None:
    """Remove the thoughts of the turns that keep none."""
    for edit in (management and management.edits) or ():
        keep = edit.keep
        if keep == "all" or (isinstance(keep, KeptTurns) and keep.type == "all"):
            continue
        kept = (keep.value if isinstance(keep, KeptTurns) else None) or 1
        for turn in [turn for turn in turns if turn.thoughts][:-kept]:
            turn.blocks = [one for one in turn.blocks if not isinstance(one[0], ThinkingBlock)]


def _blocks(message: Message, path: str) -> Iterator[tuple[Any, str]]:
    if message.role == "system":
        yield SystemText(f"<system>\n{_system_text(message, path)}\n</system>"), f"{path}.content"
    elif isinstance(message.content, str):
        yield TextBlock.model_construct(type="text", text=message.content), f"{path}.content"
    elif not message.content and message.role == "user":
        raise InvalidField(f"{path}.content must not be empty", f"{path}.content")
    else:
        for at, block in enumerate(message.content):
            yield block, f"{path}.content[{at}]"


def _system_text(message: Message, path: str) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for at, block in enumerate(message.content):
        if not isinstance(block, TextBlock):
            place = f"{path}.content[{at}].type"
            raise InvalidField(f"{place} must not be {block.type!r} in a message of the system", place)
        texts.append(block.text)
    return "\n".join(texts)
