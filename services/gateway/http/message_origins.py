"""Where the body of a request has the messages of the chat that is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MessageOrigin:
    """Where the body of the request has a message: the message, its text, and its tool calls."""

    path: str
    content: str
    calls: list[str] = field(default_factory=list)


def place_of(origins: Sequence[MessageOrigin], message: str, call: str | None, content: str | None) -> str:
    """Return where the body has a message of the chat, one of its calls or its content.

    `message` and `call` are indices as text. Empty if the chat has no such message or call.
    """
    if int(message) >= len(origins):
        return ""
    origin = origins[int(message)]
    if call is not None:
        return origin.calls[int(call)] if int(call) < len(origin.calls) else ""
    return origin.content if content else origin.path
