"""Declares how each family of models marks thoughts and writes calls of tools.

The sources are the models' chat templates and documentation; docs/dialects.md lists what each was checked against. The
probe of a template tries the formats in this order.
"""

from dataclasses import replace

from services.gateway.dialects.dialect import CallFormat, Channels, Dialect, ThoughtFormat
from services.gateway.dialects.forms.json_calls import JsonCalls
from services.gateway.dialects.forms.named_calls import NamedCalls
from services.gateway.dialects.forms.parameter_calls import ParameterCalls
from services.gateway.dialects.forms.python_calls import PythonCalls
from services.gateway.dialects.forms.quoted_calls import QuotedCalls

_OBJECTS = JsonCalls()
_NAMED = NamedCalls("", "[ARGS]", "", id_mark="[CALL_ID]", optional=True)
_FUNCTION_TAGS = ParameterCalls(
    name=("<function=", ">"), key=("<parameter=", ">"), value=("", "</parameter>"), end="</function>"
)
_LIST = ("[", "]")

HARMONY_CHANNELS = Channels(
    start="<|start|>",
    channel="<|channel|>",
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    recipient="functions.",
    thought="analysis",
)

THOUGHT_FORMATS = (
    ThoughtFormat(
        "think",
        "<think>",
        "</think>",
        (
            *(
                "deepseek_r1",
                "deepseek_v3",
                "deepseek_v4",
                "deepseek_v41",
                "glm45",
                "glm47",
                "holo2",
                "kimi_k2",
                "ling3",
            ),
            *("ernie45", "hunyuan_a13b", "minimax_m2_append_think"),
            *("mimo", "minicpmv", "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "qwen3", "step3", "step3p5"),
        ),
        frames=("<response>", "</response>", "<answer>", "</answer>"),
    ),
    ThoughtFormat("seed", "<seed:think>", "</seed:think>", ("seed_oss",)),
    ThoughtFormat("minimax-m3", "<mm:think>", "</mm:think>", ("minimax_m3",)),
    ThoughtFormat("mistral", "[THINK]", "[/THINK]"),
    ThoughtFormat("gemma4", "<|channel>thought", "<channel|>"),
    ThoughtFormat(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("cohere_command3", "cohere_command4"),
        frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ThoughtFormat("granite", "Here is my thought process:", "Here is my response:"),
)

_DEEPSEEK_BEFORE, _DEEPSEEK_AFTER = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DSML = "｜DSML｜"


def _dsml(section: str) -> tuple[ParameterCalls, str, str]:
    form = ParameterCalls(
        name=(f'<{_DSML}invoke name="', '">'),
        key=(f'<{_DSML}parameter name="', '" string="'),
        value=("", f"</{_DSML}parameter>"),
        end=f"</{_DSML}invoke>",
        says_type=True,
    )
    return form, f"<{_DSML}{section}>", f"</{_DSML}{section}>"


CALL_FORMATS = (
    CallFormat(
        "qwen3-coder",
        replace(_FUNCTION_TAGS, in_lines=True),
        "<tool_call>",
        "</tool_call>",
        ("qwen3_coder", "qwen3_xml", "step3p5", "mimo"),
        inner=("\n", "\n"),
    ),
    CallFormat(
        "glm",
        ParameterCalls(
            name=("", ""),
            key=("<arg_key>", "</arg_key>"),
            value=("<arg_value>", "</arg_value>"),
            end="",
            indent="",
            last="",
        ),
        "<tool_call>",
        "</tool_call>",
        ("glm45", "glm47", "ling3", "poolside_v1"),
        separator="",
    ),
    CallFormat(
        "hermes",
        _OBJECTS,
        "<tool_call>",
        "</tool_call>",
        ("hermes", "qwen3_json", "granite4"),
        repeats=True,
        alone=True,
        separators=",;[]",
        inner=("\n", "\n"),
    ),
    CallFormat("phi4-tags", _OBJECTS, "<|tool_call|>", "<|/tool_call|>", (), True, ",[]", ", ", _LIST),
    CallFormat("granite", _OBJECTS, "<|tool_call|>", "", (), True, ",[]", ", ", _LIST, more_openings=("<tool_call>",)),
    CallFormat(
        "seed",
        _FUNCTION_TAGS,
        "<seed:tool_call>",
        "</seed:tool_call>",
        ("seed_oss",),
        inner=("\n", "\n"),
    ),
    CallFormat(
        "minimax-m2",
        ParameterCalls(
            name=('<invoke name="', '">'), key=('<parameter name="', '">'), value=("", "</parameter>"), end="</invoke>"
        ),
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        ("minimax_m2",),
        repeats=True,
        inner=("\n", "\n"),
    ),
    CallFormat("deepseek-v3.2", *_dsml("function_calls"), ("deepseek_v32",), repeats=True, inner=("\n", "\n")),
    CallFormat("deepseek-v4", *_dsml("tool_calls"), ("deepseek_v4", "deepseek_v41"), repeats=True, inner=("\n", "\n")),
    CallFormat(
        "deepseek-v3",
        NamedCalls(f"{_DEEPSEEK_BEFORE}function{_DEEPSEEK_SEPARATOR}", "\n```json\n", f"\n```{_DEEPSEEK_AFTER}"),
        *_DEEPSEEK_SECTION,
        ("deepseek_v3",),
        repeats=True,
    ),
    CallFormat(
        "deepseek-v3.1",
        NamedCalls(_DEEPSEEK_BEFORE, _DEEPSEEK_SEPARATOR, _DEEPSEEK_AFTER),
        *_DEEPSEEK_SECTION,
        ("deepseek_v31",),
        repeats=True,
        separator="",
    ),
    CallFormat(
        "kimi-k2",
        NamedCalls(
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            prefix="functions.",
            numbers=True,
        ),
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        ("kimi_k2",),
        repeats=True,
        separator="",
    ),
    CallFormat(
        "mistral",
        _NAMED,
        "[TOOL_CALLS]",
        repeats=True,
        separators=",;[]",
        separator="[TOOL_CALLS]",
        more_forms=(_OBJECTS,),
    ),
    CallFormat(
        "mistral-list",
        _OBJECTS,
        "[TOOL_CALLS]",
        repeats=True,
        separators=",;[]",
        separator=", ",
        inner=_LIST,
        more_forms=(_NAMED,),
    ),
    CallFormat("functionary", NamedCalls("", ">", "</function>"), "<function=", "", separator=""),
    CallFormat("gemma4", QuotedCalls("call:", '<|"|>'), "<|tool_call>", "<tool_call|>", separator=""),
    CallFormat(
        "functiongemma", QuotedCalls("call:", "<escape>"), "<start_function_call>", "<end_function_call>", separator=""
    ),
    CallFormat("phi4", _OBJECTS, "functools", "", ("phi4_mini_json",), True, ",[]", ", ", _LIST),
    CallFormat("nemotron", _OBJECTS, "<TOOLCALL>", "</TOOLCALL>", (), True, ",[]", ", ", _LIST),
    CallFormat(
        "cohere",
        JsonCalls("tool_name", ("parameters",)),
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        ("cohere_command3", "cohere_command4"),
        True,
        ",[]",
        ", ",
        _LIST,
    ),
    CallFormat(
        "tool-calls",
        _OBJECTS,
        "<tool_calls>",
        "</tool_calls>",
        ("jamba", "hunyuan_a13b"),
        repeats=True,
        separators=",;[]",
        inner=("\n", "\n"),
    ),
    CallFormat("internlm", JsonCalls(), "<|action_start|><|plugin|>", "<|action_end|>", ("internlm",)),
    CallFormat("lfm2", PythonCalls(), "<|tool_call_start|>", "<|tool_call_end|>", (), True, ",[]", ", ", _LIST),
    CallFormat("olmo3", PythonCalls(), "<function_calls>", "</function_calls>", (), True, ",[]", "\n"),
    CallFormat(
        "llama3",
        JsonCalls("name", ("parameters", "arguments")),
        aliases=("llama3_json", "llama4_json"),
        repeats=True,
        separators=",;[]",
        separator="; ",
        prefixes=("<|python_tag|>",),
    ),
    CallFormat(
        "pythonic",
        PythonCalls(),
        aliases=("llama4_pythonic",),
        repeats=True,
        separators=",[]",
        separator=", ",
        inner=_LIST,
        prefixes=("<|python_start|>", "<|python_tag|>"),
    ),
)

DEFAULT_CALLS = next(one for one in CALL_FORMATS if one.name == "hermes")
"""Calls of models whose templates render no tools; Quire describes the tools, and this form, in a message."""

PLAIN_JSON = CallFormat("json", _OBJECTS, "", "", (), True, ",;[]", ", ", _LIST)
"""Calls of an output that is held to a JSON schema."""

HARMONY = Dialect(
    ThoughtFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>", ("openai_gptoss",)),
    CallFormat(
        "harmony",
        NamedCalls("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
        aliases=("openai",),
        single=True,
    ),
    HARMONY_CHANNELS,
)
