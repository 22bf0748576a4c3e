"""Converts the output of one sample to OpenAI's deltas of content, thoughts and tool calls."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.gateway.dialects.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text
from services.gateway.dialects.parser import DialectParser, ParseFailure
from services.gateway.http.openai.thought_tokens import ThoughtTokens

_ID_BYTES = 5  # Mistral's templates require ids of nine letters and digits

Delta = dict[str, Any]


class DialectDeltas:
    """The deltas of one sample. Drops calls after the first without `parallel`, and thoughts without `reasoning`.

    A client joins them, so that a line end precedes text that goes on behind a call, and a thought behind text.
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

    @property
    def called(self) -> bool:
        """Whether the output ends with calls, and not within one."""
        return self.calls > 0 and not self.parser.failures[ParseFailure.CUT]

    def push(self, text: str, token_ids: Iterable[int] = ()) -> list[Delta]:
        """Add generated text, and its tokens; return the deltas that are final."""
        if self._tokens:
            self.reasoning_tokens += self._tokens.add(token_ids)
        return self._deltas(self.parser.push(text))

    def finish(self) -> list[Delta]:
        """Return the deltas held back after the last push."""
        deltas = self._deltas(self.parser.finish())
        if self._tokens:
            self.reasoning_tokens += self._tokens.finish()
        self._on_finish(self.parser)
        return deltas

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
        goes_on = kind in self._begun and kind is not self._last and not text[0].isspace()
        self._begun.add(kind)
        self._last = kind
        return f"\n{text}" if goes_on else text

    def _start(self, name: str, call_id: str) -> Delta:
        self._dropped = bool(self.calls) and not self._parallel
        if self._dropped:
            return {}
        self.calls += 1
        function = {"name": name, "arguments": ""}
        call = {"index": self.calls - 1, "id": call_id or _new_id(), "type": "function", "function": function}
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


def _new_id() -> str:
    return secrets.token_hex(_ID_BYTES)[:9]
