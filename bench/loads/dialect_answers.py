"""Answers in several dialects as token ids, all of equal length, and the model folder and tools that they are for."""

import json
import shutil
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.gateway.dialects.declarations import CALL_FORMATS, THOUGHT_FORMATS
from services.gateway.dialects.dialect import CallFormat
from services.gateway.dialects.forms.call_form import WrittenCall
from services.gateway.text.chat_template import Conversation
from services.gateway.text.tool_prompt import with_tool_prompt

FORMATS = {one.name: one for one in CALL_FORMATS if one.name in ("hermes", "qwen3-coder", "deepseek-v3.1")}
THOUGHT = next(one for one in THOUGHT_FORMATS if one.name == "think")
# What models of these dialects have as tokens of their own.
_MARKS = (
    *(THOUGHT.start, THOUGHT.end),
    *(FORMATS["hermes"].opening, FORMATS["hermes"].closing),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)
_PROSE = """\
The report is a table with one line for each ship, and it is wrong in two places. The first is the sum: it counts a \
ship again when it leaves the harbour, so that a ship which came and left on one day counts twice. The second is the \
order of the lines, which follows the file and not the time. Both are easy to mend, but the tests compare the whole \
text, so they have to change as well. I would look at `report.py` first, then at the tests, and run them once more.

1. Count each ship once, by its number: `if ship.number not in seen`.
2. Sort the lines by the time of arrival, where a < b means that a came first.
3. Write the expected table again.
"""
_FILE = '''\
def table(ships: list[Ship]) -> str:
    """Return a line for each ship."""
    seen: dict[int, Ship] = {}
    for ship in sorted(ships, key=arrival):
        if ship.arrived < 24:
            seen.setdefault(ship.number, ship)
    return "\\n".join(map(str, seen.values()))
'''
_CALLS = (
    ("read_file", {"path": "harbour/report.py", "first_line": 1, "last_line": 80}),
    ("write_file", {"path": "harbour/report.py", "content": _FILE}),
    ("run_command", {"command": "python -m pytest tests/test_report.py -q 2>&1 | tail -n 20", "seconds": 60}),
)


def _tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    _tool("read_file", "Read lines of a text file.", path=_TEXT, first_line=_NUMBER, last_line=_NUMBER),
    _tool("write_file", "Replace a text file.", path=_TEXT, content=_TEXT),
    _tool("run_command", "Run a command in the shell; return its output.", command=_TEXT, seconds=_NUMBER),
]


def model_folder(source: Path, folder: Path) -> Path:
    """Copy the files of a tokenizer, with the marks of the dialects as tokens; return the folder.

    Its template begins a thought if `enable_thinking` is true, as those of many models do.
    """
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, folder / name)
    with (folder / "chat_template.jinja").open("a") as template:
        template.write(f"{{% if add_generation_prompt and enable_thinking %}}{THOUGHT.start}{{% endif %}}")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens(list(_MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def described(messages: Sequence[dict[str, str]]) -> list[Any]:
    """Return a conversation with the tools in a message, as the gateway writes them for a model without a form."""
    return list(with_tool_prompt(Conversation(messages, TOOLS), FORMATS["hermes"], system_role=True).messages)


def answers(folder: Path, tokens: int) -> dict[str, list[int]]:
    """Return the answers, each with `tokens` tokens: plain text; a thought and text; calls in each form, and text.

    The thought has no opening mark, because the prompt ends with it.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def prose(count: int) -> list[int]:
        return list(islice(cycle(ids(_PROSE)), count))

    thought = [*prose(tokens // 2), *ids(f"\n{THOUGHT.end}\n\n")]
    found = {"text": prose(tokens), "thought": [*thought, *prose(tokens - len(thought))]}
    for name, form in FORMATS.items():
        calls = _calls(form, ids, tokens)
        found[name] = [*calls, *prose(tokens - len(calls))]
    return found


def _calls(form: CallFormat, ids: Any, tokens: int) -> list[int]:
    """Return as many calls in turn as fit in front of the end."""
    written = [form.form.written(WrittenCall(name, json.dumps(given))) for name, given in _CALLS]
    sections: list[list[int]] = []
    for count in range(1, tokens):
        section = ids(form.section(list(islice(cycle(written), count))) + "\n\n")
        if len(section) > tokens:
            break
        sections.append(section)
    return sections[-1]
