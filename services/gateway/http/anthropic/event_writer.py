"""Encodes the events of a streamed message."""

from collections.abc import Iterable
from typing import Any

from quire.v1 import gateway_pb2
from services.gateway.dialects.events import Arguments, Event, Reasoning, Text
from services.gateway.http.anthropic.content_blocks import (
    DELTA_MEMBERS,
    BlockSeparator,
    Change,
    Grown,
    OutputEvents,
    Started,
)
from services.gateway.http.anthropic.message_object import MessageObject
from services.gateway.http.events import text_to_json, to_json

_END_OF_DELTA = b"}}\n\n"
# The events that become deltas of a kind.
_EVENTS: dict[str, type[Event]] = {"text_delta": Text, "thinking_delta": Reasoning, "input_json_delta": Arguments}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageEventWriter:
    """Encodes the events of one message.

    A delta is sent for each token, so its constant part is encoded once for each block.
    """

    def __init__(self, message: MessageObject, output: OutputEvents, separator: BlockSeparator) -> None:
        self._message = message
        self._output = output
        self._separator = separator
        self._has_begun = False
        self._prefixes: dict[type[Event], bytes] = {}  # of the deltas that an event becomes in the open block

    def start(self) -> bytes:
        """Encode the start of the message."""
        return _event("message_start", message=self._message.in_progress())

    def write(self, delta: gateway_pb2.Delta) -> bytes:
        """Encode the next text."""
        events = self._output.read(delta.text, delta.token_ids)
        if len(events) == 1 and (prefix := self._prefixes.get(type(events[0]))):
            return prefix + text_to_json(events[0].text).encode() + _END_OF_DELTA  # type: ignore[union-attr]
        return self._encode(self._separator.changes(events))

    def finish(self, finished: gateway_pb2.Finished) -> bytes:
        """Encode the end of the message."""
        rest = self._encode(self._separator.changes(self._output.rest()))
        closed = self._encode(self._separator.close())
        end = self._message.end(finished, called=self._output.called)
        usage = self._message.usage(finished, self._output.thought_tokens)
        return rest + closed + _event("message_delta", delta=end, usage=usage) + _event("message_stop")

    def _encode(self, changes: Iterable[Change]) -> bytes:
        return b"".join([self._encode_one(change) for change in changes])

    def _encode_one(self, change: Change) -> bytes:
        if isinstance(change, Grown):
            return self._prefix(change) + text_to_json(change.text).encode() + _END_OF_DELTA
        self._prefixes.clear()
        if isinstance(change, Started):
            begun = _event("content_block_start", index=change.at, content_block=change.block)
            ping, self._has_begun = b"" if self._has_begun else _PING, True
            return begun + ping
        return _event("content_block_stop", index=change.at)

    def _prefix(self, change: Grown) -> bytes:
        """Return the constant part of the deltas of one kind in the open block, and keep it for those that follow."""
        head = f'{{"type":"content_block_delta","index":{change.at},"delta":{{"type":"{change.kind}",'
        prefix = f'event: content_block_delta\ndata: {head}"{DELTA_MEMBERS[change.kind]}":'.encode()
        if change.kind in _EVENTS:
            self._prefixes[_EVENTS[change.kind]] = prefix
        return prefix


def error_event(body: dict[str, Any]) -> bytes:
    """Encode an error that ends the stream."""
    return f"event: error\ndata: {to_json(body)}\n\n".encode()


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields})}\n\n".encode()
