"""The 300 texts: twelve kinds of outputs in each of 25 dialects, equal in every run."""

import json
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from bench.dialects.profiles import PROFILES, Profile
from services.gateway.dialects.forms.call_form import WrittenCall
from services.gateway.dialects.forms.json_calls import JsonCalls
from services.gateway.dialects.forms.named_calls import NamedCalls
from services.gateway.dialects.forms.parameter_calls import ParameterCalls

SCHEMAS: dict[str, dict[str, Any]] = {
    "look_up": {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "note": {"type": ["string", "null"]},
            "count": {"type": "integer"},
            "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "deep": {"type": "boolean"},
            "options": {"type": "object"},
            "pages": {"type": "array", "items": {"type": "string"}},
        },
    },
    "look_up_word": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    "now": {"type": "object", "properties": {}},
}
"""The tools of all texts: one name begins with another one, and one tool has no arguments."""

_WORDS = ("Oslo", "birch", "ledger", "salt", "tide", "orbit", "quartz", "willow")
_UNICODE = ("naïve", "漢字", "🙂", "Ωμέγα", "e\u0301")
_SENTENCES = ("Let me check.", "I will look that up.", "One moment, please.")
_THOUGHT = "The user asks for {}; 1 < 2, so I look it up."

Arguments = Mapping[str, Any]
Call = tuple[str, Arguments]


class DialectText(NamedTuple):
    """A text. `thinks`: it is read with the parser of thoughts, too; `opened`: the prompt began the thought."""

    profile: Profile
    kind: str
    text: str
    thinks: bool = False
    opened: bool = False

    @property
    def name(self) -> str:
        """The dialect and the kind."""
        return f"{self.profile.name}: {self.kind}"


class _Writer:
    """Writes calls in the form of a profile."""

    def __init__(self, profile: Profile, draw: Random) -> None:
        self.profile = profile
        self.draw = draw

    def word(self) -> str:
        return self.draw.choice(_WORDS)

    def sentence(self) -> str:
        return self.draw.choice(_SENTENCES)

    def some(self) -> Call:
        """Return a plain call."""
        return "look_up", {"word": self.word(), "count": self.draw.randint(-3, 99)}

    def calls(self, *calls: Call) -> str:
        """Return calls with the marks around them."""
        form = self.profile.calls
        written = [form.form.written(self._call(at, *call)) for at, call in enumerate(calls)]
        if form.name == "cohere":
            written = [f'{{"tool_call_id": "{at}", {one[1:]}' for at, one in enumerate(written)]
        if form.name == "tool-calls":  # Jamba's models write a list there
            written = [f"[{', '.join(written)}]"]
        return form.section(written)

    def _call(self, at: int, name: str, arguments: Arguments) -> WrittenCall:
        own = f"functions.{name}:{at}" if self.profile.name == "kimi-k2" else ""
        return WrittenCall(name, json.dumps(arguments, ensure_ascii=False), own)

    def thought(self, thought: str, *, ends: bool = True) -> tuple[str, bool]:
        """Return a thought with its marks, and whether the prompt has the first one."""
        marks = self.profile.thought
        before = "" if self.profile.opens else f"{marks.start}\n"
        return f"{before}{thought}" + (f"\n{marks.end}\n\n" if ends else "\n"), self.profile.opens


def _several(write: _Writer) -> str:
    return write.calls(write.some(), ("now", {}), ("look_up_word", {"word": write.word()}))


def _around(write: _Writer) -> str:
    first, then = write.calls(write.some()), write.calls(("look_up_word", {"word": write.word()}))
    return f"{write.sentence()}\n{first}\nAnd then:\n{then}\nThat is all."


def _mention(write: _Writer) -> str:
    """Text that speaks of calls, with the mark of one and JSON, and has none."""
    opening = write.profile.calls.opening or "the tool"
    return f'A call begins with {opening} and has JSON such as {{"{write.word()}": [1, {{}}]}}, "quoted".\nIs it clear?'


def _nulls(write: _Writer) -> str:
    """Null arguments where the form can have them, else a null value; then a call without arguments."""
    text = write.calls(("now", {}), ("look_up", {"note": None, "share": None}))
    form = write.profile.calls.form
    if isinstance(form, JsonCalls):
        return text.replace('": {}', '": null', 1)
    return text.replace("{}", "null", 1) if isinstance(form, NamedCalls) else text


def _missing(write: _Writer) -> str:
    """A call without the arguments that its tool requires, in a form that can leave them out, else an empty object."""
    text = write.calls(("now", {}))
    form = write.profile.calls.form
    return re.sub(r', "(arguments|parameters)": {}', "", text) if isinstance(form, JsonCalls) else text


def _unknown(write: _Writer) -> str:
    return write.calls(("look_down", {"word": write.word()}), write.some())


def _cut(write: _Writer) -> str:
    """Two calls, the second of which is cut in a string."""
    text = write.calls(write.some(), ("look_up", {"word": "a long way round"}))
    return text[: text.index("way") + 1]


def _marked(write: _Writer) -> str:
    """Strings with quotes, line ends, text that is not ASCII, and the marks of the dialect."""
    calls, draw = write.profile.calls, write.draw
    inner = [f"{calls.opening}{draw.choice(_UNICODE)}", f"{draw.choice(_UNICODE)} \"a\" 'b' \\ {{[(", "one\ntwo, </b>"]
    if not isinstance(calls.form, ParameterCalls):
        inner[0] += calls.closing
    return write.calls(("look_up", {"word": inner[0], "note": inner[1], "pages": inner[2:], "options": {"é": True}}))


def _typed(write: _Writer) -> str:
    """A value of each JSON type."""
    options = {"a": [1, None, {"b": write.word()}], "c": True, "d": {}}
    values = {"word": "12", "note": "null", "count": 10**12, "share": -2.5e30, "deep": False, "options": options}
    return write.calls(("look_up", {**values, "pages": ["1", ""]}))


def _broken(write: _Writer) -> str:
    """Arguments that are no value of the form: something is missing within them."""
    text = write.calls(write.some())
    form = write.profile.calls.form
    if isinstance(form, ParameterCalls):
        return text.replace(form.value[1], "", 1)
    return re.sub(r'("count": |count=|count:)', r"\1-+", text, count=1)


_PLAIN: dict[str, Callable[[_Writer], str]] = {
    "several calls": _several,
    "text around calls": _around,
    "marks in text": _mention,
    "null arguments": _nulls,
    "no arguments": _missing,
    "unknown tool": _unknown,
    "cut call": _cut,
    "marks in strings": _marked,
    "all types": _typed,
    "broken arguments": _broken,
}


def _thinking(profile: Profile, kind: str, draw: Random) -> DialectText:
    """A thought before a call; an unclosed one has no mark at its end."""
    write = _Writer(profile, draw)
    thought, opened = write.thought(_THOUGHT.format(write.word()), ends=kind == "thought before a call")
    return DialectText(profile, kind, thought + write.calls(write.some()), True, opened)


def _samples(profile: Profile) -> list[DialectText]:
    def draw(kind: str) -> Random:
        return Random(f"{profile.name}: {kind}")

    plain = [DialectText(profile, kind, text(_Writer(profile, draw(kind)))) for kind, text in _PLAIN.items()]
    thinking = [_thinking(profile, kind, draw(kind)) for kind in ("thought before a call", "unclosed thought")]
    return plain + thinking


def samples() -> list[DialectText]:
    """Return all texts."""
    return [one for profile in PROFILES for one in _samples(profile)]
