"""One parser reads all dialects, in any pieces."""

from random import Random
from typing import Any

import pytest

from services.gateway.dialects.declarations import CALL_FORMATS, DEFAULT_CALLS, HARMONY, PLAIN_JSON, THOUGHT_FORMATS
from services.gateway.dialects.dialect import CallFormat, Dialect, ThoughtFormat
from services.gateway.dialects.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text, merged
from services.gateway.dialects.forms.call_form import WrittenCall
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser, ParseFailure
from tests.dialect_outputs import DIALECTS, cut, garbage, parsed, random_output, read

FORMATS = {one.name: one for one in CALL_FORMATS}
THINK = THOUGHT_FORMATS[0]
STRICT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
AB = OfferedTools({"a": {"type": "object", "properties": {"x": {}}}, "b": {}, "c": STRICT})


def events(dialect: Dialect | str, text: str, size: int = 1000, **options: Any) -> list[Event]:
    """Parse a text in pieces of `size`."""
    given = Dialect(None, FORMATS[dialect]) if isinstance(dialect, str) else dialect
    parser = DialectParser(given, AB, **options)
    found = [event for at in range(0, len(text), size) for event in parser.push(text[at : at + size])]
    return merged(found + parser.finish())


def call(name: str, arguments: str, call_id: str = "") -> list[Event]:
    return [CallStart(name, call_id), Arguments(arguments), CallEnd()]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_what_a_dialect_writes_is_read_wherever_it_is_cut(dialect: Dialect) -> None:
    for seed in range(25):
        draw = Random(seed)
        output = random_output(draw, dialect)
        whole = parsed(dialect, [output.text])
        assert read(whole) == (output.thought, output.answer, output.calls)
        for pieces in (list(output.text), cut(draw, output.text), cut(draw, output.text)):
            assert parsed(dialect, pieces) == whole


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_garbage_ends_and_has_the_same_events_wherever_it_is_cut(dialect: Dialect) -> None:
    for seed in range(100):
        draw = Random(seed)
        text, in_thought = garbage(draw, dialect), draw.random() < 0.3
        whole = parsed(dialect, [text], in_thought=in_thought)
        for pieces in (list(text), cut(draw, text)):
            assert parsed(dialect, pieces, in_thought=in_thought) == whole, pieces


SECTIONS = [one for one in CALL_FORMATS if one.opening and one.repeats and not one.alone and one.name != "mistral"]


@pytest.mark.parametrize("form", SECTIONS, ids=lambda form: form.name)
def test_calls_of_other_tools_in_a_section_are_text_and_hide_no_call(form: CallFormat) -> None:
    z = form.form.written(WrittenCall("z", '{"x": "a \\"b\\""}', "functions.z:7"))
    a, b = (form.form.written(WrittenCall(name, arguments)) for name, arguments in (("a", '{"x": 1}'), ("b", "{}")))
    text = form.section([z, z, a, z, b, z])
    between, (begin, end) = form.separator, form.inner
    expected = [
        Text(f"{form.opening}{begin}{z}{between}{z}"), *call("a", '{"x": 1}'), Text(z), *B,
        Text(f"{between}{z}{end}{form.closing}".lstrip()),
    ]  # fmt: skip
    for size in (1, 3, 1000):
        parser = DialectParser(Dialect(None, form), AB)
        found = [event for at in range(0, len(text), size) for event in parser.push(text[at : at + size])]
        assert merged(found + parser.finish()) == expected
        assert parser.failures == {ParseFailure.NO_CALL: 2}
    for end_at in range(len(text)):
        assert events(Dialect(None, form), text[:end_at], 1) == events(Dialect(None, form), text[:end_at])


@pytest.mark.parametrize("arguments", ["{x:[}}", "{x:]}", "{:}", "{x:1", "{x:{y:}}", "{,}", "{x}", "[1]", "{x:1}}"])
def test_a_broken_value_in_own_quotes_is_no_call(arguments: str) -> None:
    text = f"<|tool_call>call:a{arguments}<tool_call|>"
    assert events("gemma4", text) == [Text(text)]


A, B = call("a", '{"x":1}'), call("b", "{}")
CALL_A, CALL_B = '{"name":"a","arguments":{"x":1}}', '{"name": "b", "arguments": {}}'
CALLED_B = f"<tool_call>{CALL_B}</tool_call>"
MARK = '{"x":"\\"</tool_call>\\\\"}'
V3 = FORMATS["deepseek-v3"].section([FORMATS["deepseek-v3"].form.written(WrittenCall("b", "{}"))] * 2)
NO_ARGUMENTS = ("", ',"arguments":""', ',"arguments":null')
CODER_A = "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("dialect", "text", "expected"),
    [
        ("hermes", "1 < 2 <tool", [Text("1 < 2 <tool")]),
        ("hermes", f"Well. <tool_call>\n{CALL_A}\n</tool_call>", [Text("Well."), *A]),
        ("hermes", f"<tool_call>{CALL_A}</tool_call>\n{CALLED_B}\n", [*A, *B]),
        ("hermes", f"<tool_call>{CALL_A}{CALLED_B}", [*A, *B]),
        ("hermes", '<tool_call>{"name":"a","arguments":"{\\"x\\":1}"}', A),
        ("hermes", '<tool_call>{"arguments":{"x":1},"name":"a"}</tool_call>', A),
        ("hermes", '<tool_call>{"name":"a","id":"7","arguments":{"x":1},"index":0}</tool_call>', A),
        ("hermes", f"<tool_call>[{CALL_A},{CALL_B}]</tool_call>", [*A, *B]),
        ("hermes", "<tool_call>what?</tool_call> no", [Text("<tool_call>what?</tool_call> no")]),
        ("hermes", f'<tool_call>{{"name":"a","arguments":{MARK}}}</tool_call>{CALL_B}',
         [*call("a", MARK), Text(CALL_B)]),
        ("hermes", f'<tool_call>"\n</tool_call> {CALLED_B}', [Text('<tool_call>"\n</tool_call>'), *B]),
        *(("hermes", f'<tool_call>{{"name":"b"{rest}}}</tool_call>', B) for rest in NO_ARGUMENTS),
        ("mistral", f"So [TOOL [TOOL_CALLS] [{CALL_A},{CALL_B}]", [Text("So [TOOL"), *A, *B]),
        ("mistral", '[TOOL_CALLS]a[ARGS]{"x":1}[TOOL_CALLS]b{}', [*A, *B]),
        ("mistral", '[TOOL_CALLS]a[CALL_ID]Xy3[ARGS]{"x":1}', call("a", '{"x":1}', "Xy3")),
        ("mistral", '[TOOL_CALLS]a{"x":"[TOOL_CALLS]"}[TOOL_CALLS]b{}', [*call("a", '{"x":"[TOOL_CALLS]"}'), *B]),
        ("mistral", '[TOOL_CALLS]a{"x":"\n"}[TOOL_CALLS]b{}', [*call("a", '{"x":"\n"}'), *B]),
        ("mistral", "[TOOL_CALLS]oops", [Text("[TOOL_CALLS]oops")]),
        ("mistral", '[TOOL_CALLS]a{"x":1}b[CALL_ID]so it goes', [*A, Text("b[CALL_ID]so it goes")]),
        ("mistral", '[TOOL_CALLS]a{"x":1}[TOOL_CALLS]z{}', [*A, Text("[TOOL_CALLS]z{}")]),
        ("llama3", f'{CALL_A.replace("arguments", "parameters")}; {CALL_B}', [*A, *B]),
        ("llama3", '<|python_tag|>{"type": "function", "name": "a", "parameters": {"x":1}}', A),
        ("llama3", '{"nameless": 1}', [Text('{"nameless": 1}')]),
        ("llama3", "plain", [Text("plain")]),
        ("qwen3-coder", f"{CODER_A}\n{CODER_A}", [*call("a", '{"x": 1}'), *call("a", '{"x": 1}')]),
        ("qwen3-coder", "<tool_call>\n<function=b>\n</function>\n</tool_call>", B),
        ("qwen3-coder", "<tool_call>\n<function=z>\n</function>", [Text("<tool_call>\n<function=z>\n</function>")]),
        ("glm", "<tool_call>b\n</tool_call>", B),
        ("glm", "<tool_call>a<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", call("a", '{"x": 1}')),
        *(("mistral", f"[TOOL_CALLS]b[ARGS]{none} [TOOL_CALLS]b{{}}", [*B, *B]) for none in ("null", '""')),
        ("mistral", "[TOOL_CALLS]b null", B),
        ("mistral", "[TOOL_CALLS]b nullified", [Text("[TOOL_CALLS]b nullified")]),
        ("mistral", "[TOOL_CALLS]c[ARGS]null", [Text("[TOOL_CALLS]c[ARGS]null")]),
        *(("functionary", f"<function=b>{none}</function>", B) for none in ("", "null", '""', "\nnull\n")),
        *(("deepseek-v3", V3.replace("{}", none), [*B, *B]) for none in ("", "null", '""')),
        ("deepseek-v3.1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>b<｜tool▁sep｜>null<｜tool▁call▁end｜>", B),
        ("deepseek-v3.1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>b<｜tool▁sep｜>null",
         [Text("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>b<｜tool▁sep｜>null")]),
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.b:3<|tool_call_argument_begin|>{}"
         "<|tool_call_end|><|tool_calls_section_end|>", call("b", "{}", "functions.b:3")),
        ("pythonic", "[a(x=-1), b()]", [*call("a", '{"x": -1}'), *B]),
        ("pythonic", "[a(x=print(1))]", [Text("[a(x=print(1))]")]),
        ("pythonic", "[a(x={'y': [true, None]})]", call("a", '{"x": {"y": [true, null]}}')),
        ("phi4", f"functools[{CALL_A}]", A),
    ],
)  # fmt: skip
def test_calls_are_read_from_text_in_pieces_of_any_size(
    dialect: str, text: str, expected: list[Event], size: int
) -> None:
    assert events(dialect, text, size) == expected


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "z", "arguments": {}}',
        '{"name": ["a"], "arguments": {}}',
        '{"name": "a", "arguments": [1]}',
        '{"name": "c"}',
        '{"name": "c", "arguments": null}',
        '{"name": "a", "arg',
        "",
    ],
)
def test_what_is_no_call_of_an_offered_tool_stays_text(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    parser = DialectParser(Dialect(None, DEFAULT_CALLS), AB)
    assert merged(parser.push(text) + parser.finish()) == [Text(text)]
    assert parser.failures == {ParseFailure.NO_CALL: 1}


@pytest.mark.parametrize("arguments", ['{"x":1,"x" : 2.0}', "{\n}", '{"x":"\\u00fc/\\/"}', '{ "x": [1e2, -0] }'])
def test_arguments_are_those_that_the_model_wrote(arguments: str) -> None:
    for dialect, text in {
        "hermes": f'<tool_call>{{"name":"a","arguments":{arguments}}}</tool_call>',
        "mistral": f"[TOOL_CALLS]a{arguments}",
        "llama3": f'{{"name": "a", "parameters" : {arguments} }}',
    }.items():
        assert events(dialect, text, 1) == call("a", arguments)


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = DialectParser(Dialect(None, DEFAULT_CALLS), AB)
    assert parser.push('<tool_call>{"name": "a", "arguments": {"x": "') == [CallStart("a"), Arguments('{"x": "')]
    assert parser.push("long") == [Arguments("long")]
    coder = DialectParser(
        Dialect(None, FORMATS["qwen3-coder"]), OfferedTools({"a": {"properties": {"x": {"type": "string"}}}})
    )
    assert merged(coder.push("<tool_call>\n<function=a>\n<parameter=x>\nlon")) == [
        CallStart("a"),
        Arguments('{"x": "lon'),
    ]
    assert coder.push('g"\n') == [Arguments('g\\"')]


@pytest.mark.parametrize(
    ("dialect", "text", "kind", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "lo', ParseFailure.CUT, '{"x": "lo'),
        ("hermes", '<tool_call>{"name":"a","arguments":{"x": 1 2}}</tool_call>.', ParseFailure.ARGUMENTS, '{"x": 1 2}'),
        (
            "hermes",
            '<tool_call>{"name":"a","arguments":{"x":"\n"}}</tool_call>.',
            ParseFailure.ARGUMENTS,
            '{"x":"\n"}}',
        ),
        ("qwen3-coder", "<tool_call>\n<function=a>\n<parameter=x>\n[1", ParseFailure.CUT, '{"x": '),
    ],
)
def test_a_call_that_is_broken_or_cut_has_the_arguments_so_far(
    dialect: str, text: str, kind: ParseFailure, arguments: str
) -> None:
    parser = DialectParser(Dialect(None, FORMATS[dialect]), AB)
    found = merged([event for letter in text for event in parser.push(letter)] + parser.finish())
    assert found[:3] == call("a", arguments)
    assert parser.failures == {kind: 1}


def test_text_that_cannot_become_a_call_is_returned_at_once() -> None:
    def first(dialect: str, text: str) -> list[Event]:
        return DialectParser(Dialect(None, FORMATS[dialect]), AB).push(text)

    assert first("hermes", "1 < 2, <b") == [Text("1 < 2, <b")]
    assert first("hermes", "so: <tool_") == [Text("so:")]
    assert first("mistral", "[1] [TOOL") == [Text("[1]")]
    assert first("llama3", "{1}") == [Text("{1}")]


def test_without_tools_calls_are_text() -> None:
    parser = DialectParser(Dialect(THINK, DEFAULT_CALLS))
    assert merged(parser.push(f"<think>x</think>{CALLED_B}")) == [Reasoning("x"), Text(CALLED_B)]


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("text", "in_thought", "expected"),
    [
        ("<think>\nI see.\n</think>\n\n  code", False, [Reasoning("I see."), Text("  code")]),
        ("I see.\n</think>\n\nYes.", True, [Reasoning("I see."), Text("Yes.")]),
        ("I see", True, [Reasoning("I see")]),
        ("<think>I </thin", False, [Reasoning("I ")]),
        ("<think></think>Yes.", False, [Text("Yes.")]),
        ("<think>\nagain</think>Yes.", True, [Reasoning("again"), Text("Yes.")]),
        ("</think>\nNo.", False, [Text("No.")]),
        ("Yes.\n</think>\nNo.", False, [Text("Yes.\n</think>\nNo.")]),
        ("Yes <think>No</think>", False, [Text("Yes <think>No</think>")]),
        ("<think>x</think><response>Yes</response>", False, [Reasoning("x"), Text("Yes")]),
        ("The tag is <answer> 42 </answer> ok", False, [Text("The tag is <answer> 42 </answer> ok")]),
        (f"I see.{CALLED_B}", True, [Reasoning("I see."), *B]),
        ("about <tool_call>? </think>", True, [Reasoning("about <tool_call>?")]),
        (f"<think>\nOne.\n</think>\n{CALLED_B}\n<think>Two.</think>\n{CALLED_B}", False,
         [Reasoning("One."), *B, Reasoning("Two."), *B]),
        ("  Yes.", False, [Text("  Yes.")]),
    ],
)  # fmt: skip
def test_thoughts_are_separated_from_the_answer(text: str, in_thought: bool, expected: list[Event], size: int) -> None:
    assert events(Dialect(THINK, DEFAULT_CALLS), text, size, in_thought=in_thought) == merged(expected)


@pytest.mark.parametrize("thought", THOUGHT_FORMATS, ids=lambda thought: thought.name)
def test_a_call_ends_a_thought_that_has_no_mark_at_its_end(thought: ThoughtFormat) -> None:
    for size in (1, 1000):
        for text, in_thought in ((f"{thought.start}\nI see.\n", False), ("I see.\n", True)):
            found = events(Dialect(thought, DEFAULT_CALLS), text + CALLED_B, size, in_thought=in_thought)
            assert found == [Reasoning("I see."), *B]


@pytest.mark.parametrize("answer", ['{"a": "x <answer> </think> <think> y"}', "<answer> 1 </answer>", "</think>"])
def test_a_constrained_answer_has_no_thoughts_in_it(answer: str) -> None:
    for size in (1, 1000):
        found = events(Dialect(THINK, DEFAULT_CALLS), f"<think>I see.</think>\n{answer}", size, is_constrained=True)
        assert found == [Reasoning("I see."), Text(answer)]


def test_a_call_in_the_thought_before_a_constrained_answer_is_a_part_of_the_thought() -> None:
    found = events(Dialect(THINK, DEFAULT_CALLS), f"<think>So {CALLED_B}.</think>{CALLED_B}", is_constrained=True)
    assert found == [Reasoning(f"So {CALLED_B}."), *B]


@pytest.mark.parametrize("rest", ['"arguments":{"x":2}', '"parameters":{}', '"name":"b"', '"more":[1,{}]'])
def test_an_object_is_one_call_whatever_it_repeats(rest: str) -> None:
    assert events("hermes", f'<tool_call>{{"name":"a","arguments":{{"x":1}},{rest}}}</tool_call>') == A


@pytest.mark.parametrize("piece", ['<tool_call>{"x":[', '<tool_call>{"name":{', '<tool_call>{"x":"'])
def test_many_openings_without_a_call_are_text_in_a_time_that_is_bounded(piece: str) -> None:
    text = piece * 20_000
    assert events("hermes", text, 100_000) == [Text(text)]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
         [Reasoning("I see."), Text("Yes.")]),
        ('<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x":1}<|call|>', A),
        (' to=functions.a<|channel|>commentary json<|message|>{"x":1}<|call|>', A),
        ('<|channel|>analysis to=functions.a code<|message|>{"x":1}', A),
        ("<|channel|>commentary to=functions.b<|message|><|call|>", B),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
         "<|channel|>commentary to=functions.z<|message|>{}",
         [Text("I look."), Text("\n{}")]),
        ("<|channel|>analysis<|message|>One.<|end|><|channel|>analysis<|message|>Two.<|end|>"
         "<|channel|>commentary<|message|>I look.<|end|><|channel|>final<|message|>Yes.<|return|>",
         [Reasoning("One.\nTwo."), Text("I look.\nYes.")]),
        *((f"<|channel|>commentary to=functions.b<|message|>{none}<|call|>", B) for none in (" null ", '""')),
        ("<|channel|>commentary to=functions.a<|message|>[1]<|call|>", [Text("[1]")]),
        ("<|channel|>commentary to=functions.c<|message|>null<|call|>", [Text("null")]),
        ("no channel", [Text("no channel")]),
        ("<|channel|>final no message", [Text("<|channel|>final no message")]),
    ],
)  # fmt: skip
def test_messages_on_channels_are_thoughts_text_and_calls(text: str, expected: list[Event], size: int) -> None:
    assert events(HARMONY, text, size) == merged(expected)


@pytest.mark.parametrize(
    "text", ["<tool", "<tool_call>", '<tool_call>\n{"name": "a', '<tool_call>{"name": "a", "arguments": ']
)
def test_a_call_that_is_cut_before_its_arguments_is_no_text_of_a_held_output(text: str) -> None:
    for size in (1, 1000):
        assert events("hermes", text, size, is_held=True) == []
        assert events("hermes", text, size) == [Text(text)]
    assert events("hermes", '{"answer": 1}', is_held=True) == [Text('{"answer": 1}')]


LIST = '[{"name": "a", "arguments": {"x": "}\\"", "y": [{}]}}, {"name":"b","arguments":{}}]'
TAGGED = '<tool_call>\n{"name": "a", "arguments": {"x": "}\\"", "y": [{}]}}\n</tool_call>\n'
TAGGED += '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(("calls", "text"), [(DEFAULT_CALLS, TAGGED), (PLAIN_JSON, LIST)])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_required_call_that_is_cut_has_the_arguments_so_far_and_no_other_text(
    calls: Any, text: str, size: int
) -> None:
    arguments = '{"x": "}\\"", "y": [{}]}'
    start = text.index("{", text.index("arguments"))
    for end in range(len(text) + 1):
        found = events(Dialect(None, calls), text[:end], size, drops_text=True)
        assert found[:3] == (call("a", arguments[: end - start]) if end > start else [])
        assert found[3:] in ([], call("b", "{"), call("b", "{}"))
    assert found == [*call("a", arguments), *call("b", "{}")]


@pytest.mark.parametrize("calls", ["qwen3-coder", "glm", "minimax-m2"])
def test_a_call_between_tags_without_arguments_that_are_required_is_text(calls: str) -> None:
    form = FORMATS[calls]
    for name, is_call in (("c", False), ("b", True)):
        text = form.section([form.form.written(WrittenCall(name, "{}"))])
        for size in (1, 1000):
            assert events(calls, text, size) == (call(name, "{}") if is_call else [Text(text)])
    cut_in_front = form.section([form.form.written(WrittenCall("c", '{"x": 1}'))]).partition(form.form.marks[0])[0]
    assert events(calls, cut_in_front) == [Text(cut_in_front)]


@pytest.mark.parametrize("calls", ["qwen3-coder", "glm", "minimax-m2", "deepseek-v3.2"])
def test_marks_that_the_end_of_the_output_cuts_are_no_part_of_values(calls: str) -> None:
    form = FORMATS[calls]
    text = form.section([form.form.written(WrittenCall("look_up", '{"word": "Oslo", "pages": [7]}'))])
    for at in range(text.index("Oslo") + 4, text.index("[7]")):
        [_, arguments, *_] = parsed(Dialect(None, form), [text[:at]])
        assert isinstance(arguments, Arguments)
        assert arguments.text in (
            '{"word": "Oslo',
            '{"word": "Oslo"',
            '{"word": "Oslo", ',
            '{"word": "Oslo", "pages": ',
        )


@pytest.mark.parametrize("calls", ["hermes", "kimi-k2", "deepseek-v3", "qwen3-coder"])
def test_a_mark_behind_calls_that_the_end_of_the_output_cuts_is_no_text(calls: str) -> None:
    form = FORMATS[calls]
    text = form.section([form.form.written(WrittenCall("b", "{}", "functions.b:0"))])
    whole = events(calls, text)
    for at in range(len(text) - len(form.closing), len(text)):
        assert events(calls, text[:at]) == whole
