"""What a template does not render is rendered for it, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.v1 import gateway_pb2
from services.gateway.http.openai.messages import chat
from services.gateway.http.openai.requests import ChatCompletionRequest
from services.gateway.text.chat_renderer import ChatRenderer
from services.gateway.text.chat_template import ChatTemplate, ChatTemplateError, Conversation
from services.gateway.text.conversation import conversation_of
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidField

# ChatML knows no tools and writes any role; the others write those that they name.
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m.role in ['user', 'assistant'] %}[{{ m.role }}] {{ m.content | trim }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As those of LLaVA and SmolVLM, which read the parts of each message.
IN_PARTS = (
    "{% for m in messages %}{{ m.role | upper }}{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}" + CHATML
USER = {"role": "user", "content": "Add."}
SUM = {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {"type": "object"}}}
CALLS = [
    {"type": "function", "id": str(at), "function": {"name": "sum", "arguments": {"a": at, "b": "ü"}}} for at in (1, 2)
]


def renderer(source: str | None) -> ChatRenderer:
    return ChatRenderer(ChatTemplate(source, {"bos_token": "<s>"}))


def render(source: str | None, *messages: dict[str, Any], **parts: Any) -> str:
    return renderer(source).render(Conversation(messages, **({"open_turn": False} | parts)))


def test_a_model_with_a_template_for_tools_only_renders_conversations_with_tools() -> None:
    of_tools = ChatRenderer(ChatTemplate(None, {}, WITH_TOOLS))
    text = of_tools.render(Conversation([USER], [SUM], open_turn=False))
    assert "<user>Add.</user>" in text
    assert '"sum"' in text
    with pytest.raises(ChatTemplateError, match="no chat template for conversations without tools"):
        of_tools.render(Conversation([USER]))


def test_tools_are_described_in_the_system_message_if_the_template_does_not_render_them() -> None:
    system = {"role": "system", "content": "Be brief."}
    for messages in ([system, USER], [USER]):
        text = render(CHATML, *messages, tools=[SUM])
        assert f"<tools>\n{json.dumps(SUM)}\n</tools>" in text
        assert '<tool_call>\n{"name": "<function-name>", "arguments": <arguments-object>}\n</tool_call>' in text
        assert text.count("<system>") == 1
        assert text.endswith("</system>\n<user>Add.</user>\n")
    assert render(CHATML, system, USER, tools=[SUM]).startswith("<system>Be brief.\n\n# Tools\n")


def test_tools_are_described_in_the_first_message_if_the_template_has_no_system() -> None:
    text = render(STRICT, USER, tools=[SUM])
    assert text.startswith("[user] # Tools\n")
    assert text.endswith("directly.\n\nAdd.\n")


def test_calls_and_results_are_written_in_the_same_form() -> None:
    called = {"role": "assistant", "content": "So:", "tool_calls": CALLS}
    results = [{"role": "tool", "content": f"result {at}", "tool_call_id": str(at)} for at in (1, 2)]
    assert render(CHATML, USER, called, *results, {"role": "assistant", "content": "Done."}) == (
        "<user>Add.</user>\n"
        "<assistant>So:\n"
        '<tool_call>\n{"name": "sum", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "sum", "arguments": {"a": 2, "b": "ü"}}\n</tool_call></assistant>\n'
        "<user><tool_response>\nresult 1\n</tool_response>\n<tool_response>\nresult 2\n</tool_response></user>\n"
        "<assistant>Done.</assistant>\n"
    )


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '{"a": ' + "[" * 64 + "]" * 64 + "}"])
def test_arguments_that_are_no_json_object_are_written_as_they_are(arguments: str) -> None:
    sent = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="assistant")])
    sent.messages[0].tool_calls.add(name="sum", arguments=arguments)
    text = renderer(CHATML).render(conversation_of(sent))
    assert f'{{"name": "sum", "arguments": {arguments}}}\n</tool_call>' in text


# Each distinguishes a missing content from an empty one in a way of its own.
CONTENTS = [
    "{{ m.content is none }}{{ m.content is defined }}{{ 'content' in m }}{{ m.content or '' }}",
    "{% if m.content is not none %}[{{ m.content }}]{% endif %}",
    "{% if m.content is string %}[{{ m.content }}]{% elif not m.content %}nothing{% endif %}",
    "{{ m['content'] | default('absent') | trim }}{{ m.content | length }}{{ m | tojson }}",
]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "So:"}], ids=str)
@pytest.mark.parametrize("template", CONTENTS)
def test_the_content_of_a_message_with_calls_is_as_in_transformers(
    tiny_model: Callable[[str], Path], template: str, content: dict[str, Any]
) -> None:
    whole = f"{{{{ tools }}}}{{% for m in messages %}}{template}{{% endfor %}}"
    arguments = {"a": 1}
    call = {"type": "function", "id": "1", "function": {"name": "sum", "arguments": arguments}}
    messages = [USER, {"role": "assistant", **content, "tool_calls": [call]}]
    reference = AutoTokenizer.from_pretrained(tiny_model("llama"))
    expected = reference.apply_chat_template(messages, chat_template=whole, tokenize=False)
    sent = json.loads(json.dumps(messages))
    sent[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
    body = ChatCompletionRequest.model_validate({"messages": sent})
    conversation = conversation_of(chat(body.messages, [], body))._replace(open_turn=False)
    assert renderer(whole).render(conversation) == expected


WITH_ITEMS = (
    "{{ tools or '' }}{% for m in messages %}{{ m.role }}{{ m.content }}{% for c in m.tool_calls %}"
    "{% for key, value in c.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("arguments", ["[1]", "not json", "7", '"{}"'])
def test_arguments_that_the_template_cannot_render_are_refused_by_their_call(arguments: str) -> None:
    sent = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="Add.")])
    message = sent.messages.add(role="assistant", no_content=True)
    for text in ("", '{"a": 1}', arguments, arguments):
        message.tool_calls.add(id="1", name="sum", arguments=text)
    with pytest.raises(
        ChatTemplateError, match=r"arguments that are no JSON object; .*has no attribute 'items'"
    ) as fault:
        renderer(WITH_ITEMS).render(conversation_of(sent))
    assert fault.value.field == ".messages[1].tool_calls[2].arguments"
    del message.tool_calls[2:]
    assert renderer(WITH_ITEMS).render(conversation_of(sent)) == "userAdd.assistanta=1"


def test_other_arguments_are_not_blamed_for_another_fault() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [CALLS[0]]}
    other = json.loads(json.dumps(called))
    other["tool_calls"][0]["function"]["arguments"] = "[1]"
    with pytest.raises(ChatTemplateError, match="no calls here") as fault:
        render(
            "{{ tools }}{% if messages[1].tool_calls %}{{ raise_exception('no calls here') }}{% endif %}" + CHATML,
            USER,
            other,
        )
    assert fault.value.field == ""


def test_a_template_that_renders_tools_gets_them() -> None:
    assert render(WITH_TOOLS, USER, tools=[SUM]) == f"{json.dumps([SUM])}[TOOL_CALLS]<user>Add.</user>\n"
    assert renderer(WITH_TOOLS).dialect.name == "mistral"
    assert renderer("{# knows no tools #}" + CHATML).dialect.name == "hermes"


def test_a_developer_is_the_system_unless_the_template_names_developers() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert render(CHATML, developer, USER).startswith("<system>Be brief.</system>")
    named = "{% if messages[0].role == 'developer' %}!{% endif %}" + CHATML
    assert render(named, developer, USER).startswith("!<developer>Be brief.")


@pytest.mark.parametrize(
    ("template", "role", "reason"),
    [
        (STRICT, "system", "does not render the role 'system'; .*System role not supported"),
        (STRICT, "developer", "does not render the role 'system'"),
        (STRICT, "critic", "does not render the role 'critic'$"),
        (
            WITH_TOOLS.replace("<{{ m.role }}>", "{% if m.role == 'critic' %}{% break %}{% endif %}"),
            "critic",
            "'critic'",
        ),
    ],
)
def test_a_role_that_the_template_does_not_render_is_refused(template: str, role: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason) as refused:
        render(template, USER, {"role": role, "content": "Hm."})
    assert refused.value.field == ".messages[1].role"


SHORT = "{% if messages | length < 7 %}{{ raise_exception('too short') }}{% endif %}" + CHATML
NEEDS_DEPTH = "{{ raise_exception('no depth') if not depth }}" + CHATML
NO_CRITIC = "{{ raise_exception('no critics') if 'critic' in messages | map(attribute='role') }}" + CHATML


@pytest.mark.parametrize(
    ("template", "messages", "variables"),
    [(SHORT, [USER] * 7, {}), (NEEDS_DEPTH, [USER], {"depth": 3})],
)
def test_a_template_that_refuses_all_trials_renders_what_it_accepts(
    template: str, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    assert render(template, *messages, variables=variables) == render(CHATML, *messages)


@pytest.mark.parametrize(
    ("template", "role", "content", "reason", "field"),
    [
        (SHORT, "user", "Hm.", "too short", ""),
        (NEEDS_DEPTH, "critic", "Hm.", "no depth", ""),
        (NO_CRITIC, "critic", "Hm.", "role 'critic'; .*no critics", ".messages[0].role"),
        # The first fault is not the role: trials of it are refused for another reason.
        ("{{ 1 / 0 if 'zero' in messages[0].content }}" + NO_CRITIC, "critic", "zero", "division by zero", ""),
    ],
)
def test_a_role_is_at_fault_only_if_its_trials_fail_for_the_same_reason(
    template: str, role: str, content: str, reason: str, field: str
) -> None:
    with pytest.raises(ChatTemplateError, match=reason) as refused:
        render(template, {"role": role, "content": content})
    assert refused.value.field == field


def test_a_role_whose_trial_exceeds_a_limit_changes_nothing_for_others() -> None:
    large = "{{ 'a' * 10 ** 10 if messages[0].role == 'critic' and 'probes' in messages[0].content }}"
    one = renderer(large + STRICT)
    assert one.features.renders_role("critic")
    with pytest.raises(ChatTemplateError, match="role 'judge'"):
        one.render(Conversation([USER, {"role": "judge", "content": "Hm."}]))


def test_an_exception_of_the_template_is_the_reason() -> None:
    with pytest.raises(ChatTemplateError, match="users first") as refused:
        render("{{ raise_exception('users first') if messages[0].role != 'user' }}" + CHATML, {**USER, "role": "tool2"})
    assert refused.value.field == ""


def test_variables_reach_the_template_but_do_not_replace_its_own() -> None:
    template = "{{ bos_token }}{% if thinking %}{{ thinking.depth }}{% endif %}" + CHATML
    assert render(template, USER, variables={"thinking": {"depth": 3}}).startswith("<s>3<user>")
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "range"):
        with pytest.raises(ChatTemplateError, match="has its own value") as refused:
            render(template, USER, variables={name: []})
        assert refused.value.field == f".template_variables.{name}"


@pytest.mark.parametrize("content", ["So it", "So it  ", "", "  "])
@pytest.mark.parametrize("template", [STRICT, CHATML])
def test_a_message_is_continued_as_by_transformers(
    tiny_model: Callable[[str], Path], template: str, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    reference = AutoTokenizer.from_pretrained(tiny_model("llama"))
    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True
    )
    assert render(template, *messages, continue_final=True) == expected


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="does not render the last message") as refused:
        render("{{ messages[0].content }}", USER, {"role": "assistant", "content": "So"}, continue_final=True)
    assert refused.value.field == ".continue_final_message"


def test_a_model_without_a_template_says_so(tiny_model: Callable[[str], Path]) -> None:
    backend = Tokenizer.load(tiny_model("llama"))._backend
    with pytest.raises(ChatTemplateError, match=r"^The model has no chat template\.$"):
        Tokenizer(backend, ChatTemplate(None, {})).encode_chat(Conversation([USER], tools=[SUM]))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"template_variables": "[]"}, "template_variables"),
        ({"template_variables": "{"}, "template_variables"),
        ({"template_variables": '{"a": "' + "x" * 16_384 + '"}'}, "template_variables"),
        ({"template_variables": '{"a": ' + "[" * 64 + "]" * 64 + "}"}, "template_variables"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [gateway_pb2.ChatMessage(content="x")]}, "messages[0].role"),
        ({"messages": [gateway_pb2.ChatMessage(role="x" * 65)]}, "messages[0].role"),
        ({"messages": [gateway_pb2.ChatMessage(role="user", no_content=True)]}, "messages[0].no_content"),
    ],
)
def test_an_invalid_chat_is_refused_with_the_field(fields: dict[str, Any], field: str) -> None:
    sent = gateway_pb2.Chat(**{"messages": [gateway_pb2.ChatMessage(role="user", content="Hi")], **fields})
    with pytest.raises(InvalidField) as refused:
        conversation_of(sent)
    assert refused.value.field == f"prompt.chat.{field}"
    assert f"prompt.chat.{field}" in str(refused.value)


def test_texts_are_rendered_in_parts_if_the_template_renders_only_these(
    tiny_model: Callable[[str], Path],
) -> None:
    reference = AutoTokenizer.from_pretrained(tiny_model("llama"))
    texts = [("system", "Be brief."), ("user", "Hello <i>."), ("assistant", ""), ("user", "Go on.")]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]
    rendered = render(IN_PARTS, *({"role": role, "content": text} for role, text in texts), open_turn=True)
    expected = reference.apply_chat_template(parts, chat_template=IN_PARTS, tokenize=False, add_generation_prompt=True)
    assert rendered == expected
    assert "USER: Hello <i>.\nASSISTANT: \n" in rendered


def test_a_last_message_in_parts_is_continued() -> None:
    last = {"role": "assistant", "content": "Well, "}
    assert render(IN_PARTS, USER, last, continue_final=True) == "USER: Add.\nASSISTANT: Well, "


def test_tools_are_described_in_parts() -> None:
    assert "# Tools" in render(IN_PARTS, USER, tools=[SUM])


def test_texts_stay_texts_if_the_template_renders_both() -> None:
    assert render(EITHER, USER) == "Add."


def test_a_template_that_refuses_a_thought_beside_content_and_calls_gets_the_content() -> None:
    source = (
        "{% for m in messages %}{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('not both') }}"
        "{% endif %}[{{ m.thinking }}|{{ m.content }}]{% endfor %}{{ tools }}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": {}}}
    calling = {"role": "assistant", "content": "I add.", "reasoning": "Hm.", "tool_calls": [call]}
    assert "[|I add.]" in render(source, USER, calling)
    assert "[Hm.|I add.]" in render(source, USER, {**calling, "tool_calls": []})
