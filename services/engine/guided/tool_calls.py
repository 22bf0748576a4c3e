"""The grammar of tool calls, written for llguidance.

Each tool has its own schema, so references of one schema cannot lead into another.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.v1 import decoding_pb2
from services.engine.guided.argument_texts import Argument, ArgumentRules
from services.wire.requests.argument_texts import ArgumentTexts, argument_texts_of

END_OF_SEQUENCE = -1
"""The id that `tags` have for every end-of-sequence token."""

_MAX_CALLS = 16
_START, _END = "<tool_call>", "</tool_call>"
_RULE_OF_TOOL, _RULE_OF_ANSWER = "call_", "answer"
_FAULT_OF_SCHEMA = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
_LINE_OF_GRAMMAR = re.compile(r"\n\s*\d+ \| ")


class InvalidTool(ValueError):
    """A tool is refused; the message names it."""


class CallTexts(NamedTuple):
    """The texts around calls: see ToolCallGrammar."""

    begin: str = ""
    end: str = ""
    separator: str = "\n"
    after_number: str = ""


class CallableTools(NamedTuple):
    """The tools that an output may call, at most `max_calls` times.

    `schemas` has one schema for each tool, then the schema of an answer without calls, if there may be one.
    """

    max_calls: int
    names: list[str]
    schemas: list[str]
    around: list[tuple[str, str]]
    section: CallTexts
    answer: str  # schema of an output without calls, empty if there must be calls
    has_texts: bool  # of the request
    argument_texts: ArgumentTexts | None  # None if arguments are an object in JSON
    mark: str  # with which calls begin in text, empty if the output is calls
    only_at_start: bool

    @property
    def beginnings(self) -> list[str]:
        """The texts in front of arguments, up to the name of a tool and the character behind it.

        A quote there is left out where no other name goes on: models often write it in one token with what follows.
        """
        found = []
        for name, (begin, _) in zip(self.names, self.around, strict=True):
            before, written, after = split_at_name(name, begin)
            is_whole = after[:1] == '"' and not any(one.startswith(name) and one != name for one in self.names)
            found.append(f"{self.section.begin}{before}{written}{'' if is_whole else after[:1]}")
        return found


def source_of(calls: decoding_pb2.ToolCallGrammar) -> str:
    """Return a text that determines the grammar, for `tools_of`."""
    tools = [[tool.name, tool.parameters, _around(tool)] for tool in calls.tools]
    own = CallTexts(calls.section_begin, calls.section_end, calls.separator, calls.after_number)
    has_texts = any(tool.begin for tool in calls.tools)
    most = calls.max_calls if calls.HasField("max_calls") else 1
    texts = argument_texts_of(calls.argument_texts) if calls.HasField("argument_texts") else None
    in_text = calls.mark, calls.mark_only_at_start
    return json.dumps([most, tools, own if has_texts else CallTexts(), calls.answer, has_texts, texts, *in_text])


def _around(tool: decoding_pb2.CallableTool) -> tuple[str, str]:
    if tool.begin:
        return tool.begin, tool.end
    name = json.dumps(tool.name, ensure_ascii=False)
    return f'{_START}\n{{"name": {name}, "arguments": ', f"}}\n{_END}"


def tools_of(source: str) -> CallableTools:
    """Read the text of `source_of`. Raises InvalidTool."""
    most, tools, section, answer, has_texts, texts, mark, only_at_start = json.loads(source)
    if not tools or not 1 <= most <= _MAX_CALLS:
        raise InvalidTool(f"it must have at least one tool, and max_calls between 1 and {_MAX_CALLS}, not {most}")
    names, schemas, around = (list(part) for part in zip(*tools, strict=True))
    schemas += [answer] if answer else []
    pairs = [(begin, end) for begin, end in around]
    of_arguments = None if texts is None else ArgumentTexts(*texts)
    if of_arguments and of_arguments.before_text and not of_arguments.mark:
        raise InvalidTool("argument_texts.after_text must end a string if before_text begins it")
    if mark and (answer or not f"{section[0]}{around[0][0]}".startswith(mark)):
        raise InvalidTool("mark must be the beginning of calls, without an answer beside them")
    own = CallTexts(*section)
    return CallableTools(most, names, schemas, pairs, own, answer, has_texts, of_arguments, mark, only_at_start)


def tool_call_grammar(
    tools: CallableTools,
    schemas: list[dict[str, Any]],
    options: Mapping[str, Any],
    tags: Mapping[str, int],
    arguments: list[list[Argument]] | None = None,
) -> str:
    """Return the grammar, in llguidance's Lark syntax, of an output that calls tools.

    `schemas` are those of the tools as llguidance gets them, with `options` for it. `tags` are the names of tokens that
    the model has for marks: a model trained on these does not spell them out. An end-of-sequence token is no part of
    the grammar: it may follow where the output is complete. `arguments` are those of each tool if they are written one
    by one.
    """
    section, texts = tools.section, _Texts(tags)
    more = f" ({texts.of(section.separator)} call){{0,{tools.max_calls - 1}}}" if tools.max_calls > 1 else ""
    start = f"{texts.of(section.begin)} call{more} {texts.of(section.end)}"
    each = " | ".join(f"call_{at}" for at in range(len(tools.names)))
    lines = [f"start: {start}{' | answer' if tools.answer else ''}", f"call: {each}"]
    number = f" NUMBER {texts.of(section.after_number)}" if section.after_number else ""
    for at, (name, (begin, end), schema) in enumerate(zip(tools.names, tools.around, schemas, strict=False)):
        lines.append(f"{_RULE_OF_TOOL}{at}: {texts.around(name, begin)}{number} arguments_{at} {texts.of(end)}")
        if tools.argument_texts and arguments is not None:
            lines += ArgumentRules(tools.argument_texts, texts, options, str(at)).of(schema, arguments[at])
        else:
            whole = {"type": "object"} | schema | {"x-guidance": options}
            lines.append(f"arguments_{at}: %json {json.dumps(whole)}")
    if tools.answer:
        lines += [f"{_RULE_OF_ANSWER}: json", f"json: %json {json.dumps(schemas[-1] | {'x-guidance': options})}"]
    return "\n".join([*lines, "NUMBER: /[0-9]{1,3}/"] if number else lines)


def split_at_name(name: str, text: str) -> tuple[str, str, str]:
    """Return what stands in front of a tool's name, the name as it is written, and what follows."""
    for written in (json.dumps(name, ensure_ascii=False)[1:-1], name):
        before, found, after = text.rpartition(written)
        if found:
            return before, found, after
    return text, "", ""


class _Texts:
    """Implements GrammarTexts, with tokens where texts have the names of tokens."""

    def __init__(self, tags: Mapping[str, int]) -> None:
        self._tags = tags
        names = sorted(tags, key=len, reverse=True)
        self._any = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")

    def of(self, text: str) -> str:
        """Return a text as a sequence of literals and tokens; empty for an empty one."""
        parts = filter(None, self._any.split(text)) if self._tags else filter(None, [text])
        return " ".join(map(self._part, parts))

    def around(self, name: str, text: str) -> str:
        """Return a text with the name of a tool in it, which is no token whatever it is."""
        before, written, after = split_at_name(name, text)
        return " ".join(filter(None, [self.of(before), self.literal(written) if written else "", self.of(after)]))

    def literal(self, text: str) -> str:
        """See GrammarTexts."""
        return json.dumps(text, ensure_ascii=False)

    def split(self, text: str) -> tuple[str, str]:
        """See GrammarTexts."""
        before, found, after = [*self._any.split(text, 1), "", ""][:3] if self._tags else (text, "", "")
        return before, self.of(found + after)

    def _part(self, part: str) -> str:
        if part not in self._tags:
            return self.literal(part)
        return f"<[{self._tags[part]}]>" if self._tags[part] != END_OF_SEQUENCE else '""'


def split_fault(message: str, grammar: str) -> tuple[int | None, str]:
    """Return the number of the tool whose schema llguidance's message is about, and the message without the grammar.

    An answer has the number after the last tool.
    """
    if not (found := _FAULT_OF_SCHEMA.match(message)):
        return None, message
    before = grammar.splitlines()[: int(found[1])]
    at = sum(line.startswith((_RULE_OF_TOOL, _RULE_OF_ANSWER)) for line in before) - 1
    return at, _LINE_OF_GRAMMAR.split(message[found.end() :])[0]
