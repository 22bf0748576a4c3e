"""Finds the dialect of a model by the conversations that its chat template renders."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.gateway.dialects.declarations import CALL_FORMATS, HARMONY, HARMONY_CHANNELS, THOUGHT_FORMATS
from services.gateway.dialects.dialect import CallFormat, Dialect, ThoughtFormat
from services.gateway.dialects.events import Arguments, CallStart, Event, Text, merged
from services.gateway.dialects.forms.json_text import loaded
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Renders messages and tools, with the assistant's turn open or not; empty if the template refuses them."""

_NAME, _ID, _THOUGHT = "look_up_word", "call00001", "Quire ponders this."
_ARGUMENTS = {"word": "page", "count": 3}
_PROPERTIES = {"word": {"type": "string"}, "count": {"type": "integer"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["word"]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Looks up.", "parameters": _PARAMETERS}}
_CALL: dict[str, Any] = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_USER: dict[str, Any] = {"role": "user", "content": "Hello."}
_RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "A leaf."}
_TOOLS = OfferedTools({_NAME: _PARAMETERS})
_MARK = 40  # characters
_CONTENTS = ("", None, "I look it up.")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The names that templates have for the thought of a message."""


def dialect_of(render: Render, source: str) -> Dialect:
    """Return the dialect of the template with this source. What it does not show is None."""
    if all(mark in source for mark in HARMONY_CHANNELS.marks):
        return HARMONY
    return Dialect(_thought(render, source), written_calls(render) or _described_calls(source))


def written_calls(render: Render) -> CallFormat | None:
    """Return the format in which the template writes a call, None if it writes none in a known one."""
    before = render([_USER], [_TOOL], True)
    for content in _CONTENTS:
        calling: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
        for conversation in ([_USER, calling, _RESULT], [_USER, calling]):
            turn = _turn(before, render(conversation, [_TOOL], False), "A leaf.")
            for calls in CALL_FORMATS if turn else ():
                if _reads(calls, turn):
                    return calls
    return None


def _described_calls(source: str) -> CallFormat | None:
    """Return the format whose marks are in a template that writes no calls: it describes them, or refuses the probe."""
    return next(
        (calls for calls in CALL_FORMATS if calls.opening and all(mark in source for mark in _marks(calls))), None
    )


def _marks(calls: CallFormat) -> tuple[str, ...]:
    is_shared = sum((one.opening, one.closing) == (calls.opening, calls.closing) for one in CALL_FORMATS) > 1
    return (calls.opening, calls.closing, *(calls.form.marks if is_shared and calls.closing else ()))


def _turn(before: str, rendered: str, result: str) -> str:
    """Return the last turns of a rendered conversation, up to the result of the call."""
    common = next((at for at, (one, other) in enumerate(zip(before, rendered, strict=False)) if one != other), None)
    start = min(len(before), len(rendered)) if common is None else common
    # Both may have a mark there that begins alike.
    start = max(rendered.rfind("<", max(0, start - _MARK), start), 0) if _is_in_mark(rendered[:start]) else start
    return rendered[start:].partition(result)[0]


def _is_in_mark(text: str) -> bool:
    return text.rfind("<") > max(text.rfind(">"), len(text) - _MARK)


def _reads(calls: CallFormat, turn: str) -> bool:
    """Return whether the turn has the probe's call in this format, and without an opening mark nothing before it."""
    parser = DialectParser(Dialect(None, replace(calls, more_forms=(), more_openings=())), _TOOLS)
    events: list[Event] = merged(parser.push(turn) + parser.finish())
    named = [event.name for event in events if isinstance(event, CallStart)]
    given = [loaded(event.text) for event in events if isinstance(event, Arguments)]
    answer = "".join(event.text for event in events if isinstance(event, Text))
    return named == [_NAME] and given == [_ARGUMENTS] and _NAME not in answer


def _thought(render: Render, source: str) -> ThoughtFormat | None:
    """Return the format in which the template writes a thought, opens one, or drops one."""
    for rendered in _thoughts(render):
        if found := _around(rendered):
            return found
    opened = render([_USER], [], True)
    for thought in THOUGHT_FORMATS:
        if thought.start in opened[-64:]:
            return thought
    return next((one for one in THOUGHT_FORMATS if _quotes(source, one.end)), None)


def _thoughts(render: Render) -> Iterator[str]:
    """Yield conversations with a thought in them, as the template renders them."""
    thought = dict.fromkeys(THOUGHT_KEYS, _THOUGHT)
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": "Hello."}]
    yield render([_USER, {"role": "assistant", "content": "Hello.", **thought}], [], False)
    calling = {"role": "assistant", "content": "", "tool_calls": [_CALL], **thought}
    yield render([_USER, calling, _RESULT], [_TOOL], False)
    yield render([_USER, {"role": "assistant", "content": parts}], [], False)


def _around(rendered: str) -> ThoughtFormat | None:
    before, found, after = rendered.partition(_THOUGHT)
    if not found:
        return None
    formats = (one for one in THOUGHT_FORMATS if before.rstrip().endswith(one.start))
    return next((one for one in formats if after.lstrip().startswith(one.end)), None)


def _quotes(source: str, mark: str) -> bool:
    """Return whether a template compares with a mark, or writes it."""
    return re.search(rf"['\"][^'\"]*{re.escape(mark)}", source) is not None or f"}}{mark}" in source
