"""The dialect of a model is that of its template, or the one that the operator names."""

from pathlib import Path

import pytest

from services.gateway.dialects.declarations import CALL_FORMATS, HARMONY, THOUGHT_FORMATS
from services.gateway.dialects.selection import CALL_PARSERS, REASONING_PARSERS, DialectSelection
from services.gateway.text.chat_renderer import ChatRenderer
from services.gateway.text.chat_template import ChatTemplate, Conversation

TURNS = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{}{{{{ m.content or '' }}}}{}<|im_end|>\n{{% endfor %}}{}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
EACH = "{{% for c in m.tool_calls or [] %}}{}{{% endfor %}}"
ARGUMENTS = "{% for key, value in c.function.arguments.items() %}"
CALLS = {
    "hermes": "<tool_call>\n{{ c.function | tojson }}\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function={{ c.function.name }}>\n"
    + ARGUMENTS
    + "<parameter={{ key }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm": "<tool_call>{{ c.function.name }}"
    + ARGUMENTS
    + "<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>"
    "{% endfor %}</tool_call>",
    "mistral": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    "llama3": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.function.name }}:0"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "pythonic": "[{{ c.function.name }}(" + ARGUMENTS + "{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}"
    "{% endfor %})]",
}


def renderer(source: str, selection: DialectSelection | None = None) -> ChatRenderer:
    template = ChatTemplate(source, {})
    return ChatRenderer(template, selection) if selection else ChatRenderer(template)


def template(calls: str = "", thought: str = "", tools: str = TOOLS, end: str = "") -> str:
    opened = "{% if add_generation_prompt %}<|im_start|>assistant\n" + end + "{% endif %}"
    return tools + TURNS.format(thought, EACH.format(calls), opened)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("thinks", [True, False])
def test_the_dialect_is_found_by_what_a_template_writes(name: str, thinks: bool) -> None:
    made = renderer(template(CALLS[name], THOUGHT if thinks else ""))
    assert made.dialect.name == ("think+" if thinks else "") + name


def test_a_thought_that_the_template_only_opens_is_found() -> None:
    assert renderer(template(CALLS["hermes"], end="<think>\n")).dialect.name == "think+hermes"


def test_marks_in_the_source_show_a_form_that_is_not_written() -> None:
    described = "{# write <tool_call><arg_key>k</arg_key><arg_value>v</arg_value></tool_call> #}" + TOOLS
    assert renderer(template(tools=described)).dialect.name == "glm"


def test_an_unknown_form_is_none() -> None:
    assert renderer(template("!call {{ c.function.name }}")).dialect.name == "plain"


def test_a_template_that_describes_no_tools_has_the_form_that_quire_describes() -> None:
    made = renderer(template(tools=""))
    assert made.dialect.name == "hermes"


def test_a_template_that_writes_calls_and_describes_no_tools_gets_a_description_in_its_form() -> None:
    made = renderer(template(CALLS["deepseek-v3.1"], tools=""))
    assert made.dialect.name == "deepseek-v3.1"
    tool = {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}
    call = {"type": "function", "id": "1", "function": {"name": "now", "arguments": {}}}
    user = {"role": "user", "content": "Hi"}
    text = made.render(Conversation([user, {"role": "assistant", "content": "", "tool_calls": [call]}], [tool]))
    assert text.count("<｜tool▁call▁begin｜>") == 2
    assert '"name": "now"' in text


def test_an_operator_can_name_the_forms() -> None:
    source = template(CALLS["hermes"], THOUGHT)
    for calls, thought, name in (
        ("auto", "auto", "think+hermes"),
        ("qwen3_coder", "auto", "think+qwen3-coder"),
        ("none", "auto", "think"),
        ("auto", "none", "hermes"),
        ("deepseek_v31", "seed_oss", "seed+deepseek-v3.1"),
        ("openai", "none", "harmony"),
        ("none", "none", "plain"),
    ):
        assert renderer(source, DialectSelection(calls, thought)).dialect.name == name
    assert renderer(source, DialectSelection("none", "openai_gptoss")).dialect == HARMONY


def test_vllms_names_of_parsers_are_known() -> None:
    named = {"hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "glm45", "kimi_k2", "pythonic", "openai"}
    assert named < {*CALL_PARSERS}
    assert {"deepseek_r1", "qwen3", "glm45", "mistral", "openai_gptoss", "granite"} < {*REASONING_PARSERS}


def test_the_page_of_dialects_lists_every_format_and_every_name_of_vllm() -> None:
    page = (Path(__file__).parents[4] / "docs" / "dialects.md").read_text()
    formats = (*CALL_FORMATS, HARMONY.calls, *THOUGHT_FORMATS)
    missing = {name for one in formats if one for name in (one.name, *one.aliases) if f"`{name}`" not in page}
    assert not missing
