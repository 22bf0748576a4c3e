"""Builds the output items of a response, with the events that announce them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.dialects.parser import ParseFailure
from services.gateway.http.openai.dialect_deltas import DialectDeltas
from services.gateway.http.openai.responses_api.custom_input import CustomInput
from services.gateway.http.openai.responses_api.response_tools import DeclaredTool
from services.gateway.http.thought_carrier import carried

# The type and the fields of an event, without its sequence number.
ItemEvent = tuple[str, dict[str, Any]]
Scores = Sequence[dict[str, Any]]


class OutputItems:
    """The items of one response: thoughts, messages and calls, in the order in which they are generated.

    `deltas` separates them; None if all output is text. `tools` are those of the request, by the names that the model
    calls them. With `encrypted_thoughts`, thoughts have the form in which clients send them back, too.
    """

    def __init__(
        self,
        name: str,
        deltas: DialectDeltas | None,
        tools: Mapping[str, DeclaredTool] | None = None,
        *,
        encrypted_thoughts: bool = False,
    ) -> None:
        """`name` makes the ids of the items unique."""
        self._name = name
        self._deltas = deltas
        self._tools = tools or {}
        self._encrypted_thoughts = encrypted_thoughts
        self._arguments = ""  # of the open custom call
        self._input = CustomInput()  # of the same
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open item
        self._scores: list[dict[str, Any]] = []  # of the open message
        self._pending: list[dict[str, Any]] = []  # of tokens whose text is held back
        self._open = False

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items; the last one has no content while it is open."""
        return self._items

    @property
    def text_place(self) -> dict[str, Any] | None:
        """The place of the open message, if all text belongs to it; None if calls can follow."""
        return self._place() if self._deltas is None and self._open else None

    def append_text(self, text: str) -> None:
        """Append text to the open message without an event."""
        self._texts.append(text)

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of thoughts."""
        return self._deltas.reasoning_tokens if self._deltas else 0

    def push(self, text: str, scores: Scores = (), token_ids: Sequence[int] = ()) -> list[ItemEvent]:
        """Add generated text, its tokens and their log-probabilities; return the events of what is final."""
        self._pending += scores
        if self._deltas is not None:
            return self._events(self._deltas.push(text, token_ids))
        return self._events([{"content": text}])

    def finish(self, status: str) -> list[ItemEvent]:
        """Close the last item with this status; a complete call is completed in any response.

        A response without items gets an empty message.
        """
        events = self._events(self._deltas.finish()) if self._deltas else []
        if not self._items:
            events += self._start_message()
        if self._in("message") and self._pending:
            events.append(self._text_delta(""))
        is_cut = self._deltas is not None and bool(self._deltas.parser.failures[ParseFailure.CUT])
        return [*events, *self._close("incomplete" if is_cut and not self._in("message") else status)]

    def _events(self, deltas: list[dict[str, Any]]) -> list[ItemEvent]:
        return [event for delta in deltas for event in self._delta_events(delta)]

    def _delta_events(self, delta: dict[str, Any]) -> Iterator[ItemEvent]:
        if thought := delta.get("reasoning"):
            if not self._in("reasoning"):
                yield from self._close("completed")
                thought = thought.removeprefix("\n") if self._items else thought
                yield from self._start_reasoning()
            self._texts.append(thought)
            yield "response.reasoning_text.delta", {**self._place(), "delta": thought}
        if text := delta.get("content"):
            if not self._in("message"):
                yield from self._close("completed")
                text = text.removeprefix("\n") if self._items else text
                yield from self._start_message()
            yield self._text_delta(text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._close("completed")
                yield self._start_call(call["id"], call["function"]["name"])
            if arguments := call["function"]["arguments"]:
                yield from self._arguments_delta(arguments)

    def _arguments_delta(self, arguments: str) -> Iterator[ItemEvent]:
        if not self._in("custom_tool_call"):
            self._texts.append(arguments)
            yield "response.function_call_arguments.delta", {**self._call_place(), "delta": arguments}
            return
        self._arguments += arguments
        yield from self._input_delta(self._input.push(arguments))

    def _input_delta(self, text: str) -> Iterator[ItemEvent]:
        if text:
            self._texts.append(text)
            yield "response.custom_tool_call_input.delta", {**self._call_place(), "delta": text}

    def _in(self, kind: str) -> bool:
        return self._open and self._items[-1]["type"] == kind

    def _start_reasoning(self) -> Iterator[ItemEvent]:
        yield self._start({"type": "reasoning", "summary": [], "content": []}, "rs")
        yield "response.content_part.added", {**self._place(), "part": _thought_part("")}

    def _start_message(self) -> Iterator[ItemEvent]:
        yield self._start({"type": "message", "role": "assistant", "content": []}, "msg")
        yield "response.content_part.added", {**self._place(), "part": _text_part("", [])}

    def _start_call(self, call_id: str, name: str) -> ItemEvent:
        tool = self._tools.get(name)
        item = {"call_id": call_id, **(tool.names() if tool else {"name": name})}
        if tool and tool.is_custom:
            self._arguments, self._input = "", CustomInput()
            return self._start({"type": "custom_tool_call", **item, "input": ""}, "ctc")
        return self._start({"type": "function_call", **item, "arguments": ""}, "fc")

    def _start(self, item: dict[str, Any], kind: str) -> ItemEvent:
        at = len(self._items)
        item |= {"id": f"{kind}_{self._name}_{at}", "status": "in_progress"}
        self._items.append(item)
        self._texts.clear()
        self._open = True
        return "response.output_item.added", {"output_index": at, "item": dict(item)}

    def _text_delta(self, text: str) -> ItemEvent:
        scores, self._pending = self._pending, []
        self._texts.append(text)
        self._scores += scores
        return "response.output_text.delta", {**self._place(), "delta": text, "logprobs": scores}

    def _close(self, status: str) -> Iterator[ItemEvent]:
        if not self._open:
            return
        item = self._items[-1]
        if item["type"] == "message":
            yield from self._close_message(item)
        else:
            self._pending.clear()  # only messages have log-probabilities
            if item["type"] == "reasoning":
                yield from self._close_reasoning(item)
            elif item["type"] == "custom_tool_call":
                yield from self._close_custom_call(item)
                status = "completed" if _is_json(self._arguments) else status
            else:
                yield from self._close_call(item)
                status = "completed" if _is_json(item["arguments"]) else status
        item["status"] = status
        self._open = False
        yield "response.output_item.done", {"output_index": len(self._items) - 1, "item": item}

    def _close_message(self, item: dict[str, Any]) -> Iterator[ItemEvent]:
        text, scores, self._scores = "".join(self._texts), self._scores, []
        part = _text_part(text, scores)
        yield "response.output_text.done", {**self._place(), "text": text, "logprobs": scores}
        yield "response.content_part.done", {**self._place(), "part": part}
        item["content"] = [part]

    def _close_reasoning(self, item: dict[str, Any]) -> Iterator[ItemEvent]:
        text = "".join(self._texts)
        yield "response.reasoning_text.done", {**self._place(), "text": text}
        yield "response.content_part.done", {**self._place(), "part": _thought_part(text)}
        item["content"] = [_thought_part(text)]
        if self._encrypted_thoughts:
            item["encrypted_content"] = carried(text)

    def _close_custom_call(self, item: dict[str, Any]) -> Iterator[ItemEvent]:
        yield from self._input_delta(self._input.finish())
        item["input"] = "".join(self._texts)
        yield "response.custom_tool_call_input.done", {**self._call_place(), "input": item["input"]}

    def _close_call(self, item: dict[str, Any]) -> Iterator[ItemEvent]:
        item["arguments"] = "".join(self._texts)
        done = {**self._call_place(), "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done

    def _call_place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _place(self) -> dict[str, Any]:
        return {**self._call_place(), "content_index": 0}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
