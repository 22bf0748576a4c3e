"""Encodes the events of a streamed response."""

from collections.abc import Iterable, Sequence
from typing import Any

from quire.v1 import gateway_pb2
from services.gateway.http.events import to_json
from services.gateway.http.openai.responses_api.output_items import ItemEvent, OutputItems, Scores
from services.gateway.http.openai.responses_api.response_object import ResponseObject, status_of_end


class ResponseEventWriter:
    """Encodes the events of one response, with their sequence numbers."""

    def __init__(self, response: ResponseObject, items: OutputItems) -> None:
        self._response = response
        self._items = items
        self._next_number = 0
        self._text_prefix = b""  # the constant part of a text's event, because one is sent for each token

    def start(self) -> bytes:
        """Encode the start of the response."""
        started = {"response": self._response.in_progress()}
        return self._encode([("response.created", started), ("response.in_progress", started)])

    def write(self, text: str, scores: Scores | None, token_ids: Sequence[int] = ()) -> bytes:
        """Encode the next text. `scores` are the log-probabilities of its tokens; None if not requested."""
        if self._text_prefix:
            return self._text_event(text) if text else b""
        encoded = self._encode(self._items.push(text, scores or (), token_ids))
        if scores is None and (place := self._items.text_place):
            fields = to_json({"type": "response.output_text.delta", **place, "logprobs": []})[:-1]
            self._text_prefix = f'event: response.output_text.delta\ndata: {fields},"sequence_number":'.encode()
        return encoded

    def finish(self, finished: gateway_pb2.Finished) -> bytes:
        """Encode the end of the response."""
        status = status_of_end(finished.samples[0])
        closed = self._encode(self._items.finish(status))
        response = self._response.finished(finished, self._items.items, self._items.reasoning_tokens)
        return closed + self._encode([(f"response.{status}", {"response": response})])

    def fail(self, code: str, message: str) -> bytes:
        """Encode the end of a response that an error ended."""
        response = self._response.failed(self._items.items, code, message)
        return self._encode([("response.failed", {"response": response})])

    def _text_event(self, text: str) -> bytes:
        self._items.append_text(text)
        number, self._next_number = self._next_number, self._next_number + 1
        return b'%b%d,"delta":%b}\n\n' % (self._text_prefix, number, to_json(text).encode())

    def _encode(self, events: Iterable[ItemEvent]) -> bytes:
        return b"".join([self._encode_one(kind, fields) for kind, fields in events])

    def _encode_one(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        data = to_json({"type": kind, "sequence_number": number, **fields})
        return f"event: {kind}\ndata: {data}\n\n".encode()
