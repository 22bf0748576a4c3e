"""Converts the output of one sample to OpenAI's deltas of content, thoughts and tool calls."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.gateway.dialects.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text
from services.gateway.dialects.parser import DialectParser, ParseFailure
from services.gateway.http.events import text_to_json, to_json
from services.gateway.http.openai.thought_tokens import ThoughtTokens

_ID_BYTES = 5  # Mistral's templates require ids of nine letters and digits

Delta = dict[str, Any]


class DialectDeltas:
    """The deltas of one sample. Drops calls after the first without `parallel`, and thoughts without `reasoning`.

    A client joins them, so that a line end precedes text that goes on behind a call, and a thought behind text. Read
    all deltas in one way: as objects, or encoded as JSON without the last brace, in a quarter of the time.
    """

    def __init__(
        self,
        parser: DialectParser,
        *,
        parallel: bool = True,
        reasoning: bool = True,
        tokens: ThoughtTokens | None = None,
        on_finish: Callable[[DialectParser], None] = lambda _: None,
    ) -> None:
        """`tokens` counts those of thoughts. `on_finish` is called at the end of the output."""
        self._on_finish = on_finish
        self.parser = parser
        self._tokens = tokens
        self.reasoning_tokens = 0
        self._parallel = parallel
        self._reasoning = reasoning
        self._dropped = False  # the current call
        self.calls = 0
        self._last: type[Event] | None = None
        self._begun: set[type[Event]] = set()
        self._arguments = b""  # what stands in front of those of the current call

    @property
    def called(self) -> bool:
        """Whether the output ends with calls, and not within one."""
        return self.calls > 0 and not self.parser.failures[ParseFailure.CUT]

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """Add generated text, and its tokens; return the deltas that are final."""
        if self._tokens:
            self.reasoning_tokens += self._tokens.add(token_ids)
        return self._deltas(self.parser.push(text))

    def finish(self) -> list[Delta]:
        """Return the deltas held back after the last push."""
        deltas = self._deltas(self.parser.finish())
        self._end()
        return deltas

    def events(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """As `push`, as events without what is dropped."""
        if self._tokens:
            self.reasoning_tokens += self._tokens.add(token_ids)
        passed = self.parser.passed(text)
        if passed is None:
            return self._kept(self.parser.push(text))
        return [passed] if isinstance(passed, Text) else self._kept((passed,))

    def rest_of_events(self) -> list[Event]:
        """As `finish`, as events without what is dropped."""
        events = self._kept(self.parser.finish())
        self._end()
        return events

    def encode(self, text: str, token_ids: Sequence[int]) -> list[bytes]:
        """As `push`, encoded."""
        if self._tokens:
            self.reasoning_tokens += self._tokens.add(token_ids)
        passed = self.parser.passed(text)
        if passed is None:
            return [part for event in self.parser.push(text) if (part := self._encoded(event))]
        part = self._encoded(passed)
        return [part] if part else []

    def encode_rest(self) -> list[bytes]:
        """As `finish`, encoded."""
        parts = [part for event in self.parser.finish() if (part := self._encoded(event))]
        self._end()
        return parts

    def _end(self) -> None:
        if self._tokens:
            self.reasoning_tokens += self._tokens.finish()
        self._on_finish(self.parser)

    def _kept(self, events: Iterable[Event]) -> list[Event]:
        """Count the calls and the thoughts of events, and return those that are not dropped."""
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                if self._tokens:
                    self._tokens.add_text(event.text)
            elif isinstance(event, CallStart):
                self._begin_call()
            if not (self._dropped and isinstance(event, CallStart | Arguments | CallEnd)):
                kept.append(event)
        return kept

    def _encoded(self, event: Event) -> bytes:
        """Encode a delta, with what stays the same written once."""
        if isinstance(event, Text):
            return b'{"content":' + text_to_json(self._separated(Text, event.text)).encode()
        if isinstance(event, Reasoning):
            return self._encoded_thought(event.text)
        if isinstance(event, Arguments):
            return b"" if self._dropped else self._arguments + text_to_json(event.text).encode() + b"}}]"
        delta = self._delta(event)
        self._arguments = b'{"tool_calls":[{"index":%d,"function":{"arguments":' % (self.calls - 1)
        return to_json(delta).encode()[:-1] if delta else b""

    def _encoded_thought(self, text: str) -> bytes:
        if self._tokens:
            self._tokens.add_text(text)
        encoded = text_to_json(self._separated(Reasoning, text)).encode()
        return b'{"reasoning":' + encoded + b',"reasoning_content":' + encoded if self._reasoning else b""

    def _deltas(self, events: Iterable[Event]) -> list[Delta]:
        return [delta for event in events if (delta := self._delta(event))]

    def _delta(self, event: Event) -> Delta:
        match event:
            case Text(text):
                return {"content": self._separated(Text, text)}
            case Reasoning(text):
                if self._tokens:
                    self._tokens.add_text(text)
                text = self._separated(Reasoning, text)
                # Clients differ in which of both names they read.
                return {"reasoning": text, "reasoning_content": text} if self._reasoning else {}
            case CallStart(name, call_id):
                self._last = CallStart
                return self._start(name, call_id)
            case Arguments(text):
                call = {"index": self.calls - 1, "function": {"arguments": text}}
                return {} if self._dropped else {"tool_calls": [call]}
            case CallEnd():
                return {}

    def _separated(self, kind: type[Event], text: str) -> str:
        """Return a part of the content or of the thoughts, behind a line end if something else stands before it."""
        if kind is self._last:
            return text
        goes_on = kind in self._begun and not text[0].isspace()
        self._begun.add(kind)
        self._last = kind
        return f"\n{text}" if goes_on else text

    def _begin_call(self) -> None:
        """Count a call, or drop it."""
        self._dropped = bool(self.calls) and not self._parallel
        self.calls += not self._dropped

    def _start(self, name: str, call_id: str) -> Delta:
        self._begin_call()
        if self._dropped:
            return {}
        function = {"name": name, "arguments": ""}
        call = {"index": self.calls - 1, "id": call_id or new_call_id(), "type": "function", "function": function}
        return {"tool_calls": [call]}


def message_of(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Return the message that deltas make up."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            index = call.pop("index")
            if index < len(calls):
                calls[index]["function"]["arguments"] += call["function"]["arguments"]
            else:
                calls.append(call)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls or reasoning:
        message["content"] = content or None
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return message | {"tool_calls": calls} if calls else message


def new_call_id() -> str:
    """Return a random id of a call."""
    return secrets.token_hex(_ID_BYTES)[:9]
