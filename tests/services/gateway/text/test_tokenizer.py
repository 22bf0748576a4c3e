import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer

from services.engine.startup.tokenizer_files import TokenizerFiles
from services.gateway.text.chat_template import ChatTemplateError, Conversation
from services.gateway.text.tokenizer import Tokenizer, TokenizerLoadError
from tests.services.gateway.text.test_detokenizer import LINES, byte_level

TEXTS = [*LINES, "", "unseen words, ÿ and 🦆", "<s>not quite</s> plain"]

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message['role'] not in ['user', 'system', 'assistant'] %}\n"
    "    {{ raise_exception('no ' + message['role'] + ' here') }}\n"
    "  {% endif %}\n"
    "{% generation %}{{ message['role'] }}: {{ message['content'] | tojson }}{% endgeneration %}"
    "{% if loop.index == 9 %}{% break %}{% endif %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if tools is defined and tools is none %}-{% endif %}{{ strftime_now('%%') }}"
)
ADDED_TOKEN = {"__type": "AddedToken", "content": "</s>"}  # the format of older folders
_TURNS = [("system", 'Be <brief> & "kind".'), ("user", "Grüße 🙂\n  "), ("assistant", "Hallo"), ("user", "你好?")]
CHAT = Conversation([{"role": role, "content": content} for role, content in _TURNS])


def one_message(role: str, content: str) -> Conversation:
    return Conversation([{"role": role, "content": content}])


def trained() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer that adds <s> before each text, with truncation and padding."""
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(5)
    backend.enable_padding(length=50, pad_token="</s>", pad_id=1)
    return backend


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def model_folder(folder: Path, template: str | None = TEMPLATE, **settings: Any) -> Path:
    """Write a model folder with a separate file for the chat template."""
    trained().save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": ADDED_TOKEN}
    write_json(folder / "tokenizer_config.json", names | settings)
    write_json(folder / "config.json", {"model_type": "llama"})
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def assert_equals_transformers(folder: Path) -> None:
    tokenizer, reference = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    messages = CHAT.messages
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    rendered = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.chat_template.render(CHAT) == rendered
    ids = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode_chat(CHAT) == ids
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids)
    assert tokenizer.vocabulary_size == len(reference)


def test_a_model_folder_is_read_as_by_transformers(tmp_path: Path) -> None:
    assert_equals_transformers(model_folder(tmp_path))


def test_special_tokens_from_the_settings_are_tokens(tmp_path: Path) -> None:
    assert_equals_transformers(model_folder(tmp_path, template="{{ messages[0].content }}<end>", eos_token="<end>"))


def test_a_folder_of_older_files_is_read_as_by_transformers(tmp_path: Path) -> None:
    model_folder(tmp_path, tokenizer_class="GPT2Tokenizer", unk_token="<s>")
    (tmp_path / "tokenizer.json").unlink()
    trained().model.save(str(tmp_path))
    assert_equals_transformers(tmp_path)


def test_the_demo_model_is_read_as_by_transformers(demo_model: Path) -> None:
    assert_equals_transformers(demo_model)


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(model_folder(tmp_path))
    assert tokenizer.decode(tokenizer.encode(LINES[0])) == LINES[0]
    assert tokenizer.encode("") == [0]


NAMED_TEMPLATES = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "talk"}]


@pytest.mark.parametrize(
    ("file", "settings", "rendered"),
    [
        (None, "{{ bos_token }}{{ messages[0].content }}", '<s>Be <brief> & "kind".'),
        (None, NAMED_TEMPLATES, "talk"),
        ("file", "settings", "file"),
    ],
    ids=["settings", "default of several", "a file overrides the settings"],
)
def test_the_chat_template_is_in_a_file_or_in_the_settings(
    tmp_path: Path, file: str | None, settings: Any, rendered: str
) -> None:
    folder = model_folder(tmp_path, template=file, chat_template=settings)
    assert Tokenizer.load(folder).chat_template.render(CHAT) == rendered


@pytest.mark.parametrize(
    ("config", "rendered"), [({"text_config": {}}, "processor"), ({"vision_config": {}}, "processor"), ({}, "file")]
)
def test_the_chat_template_of_a_processor_counts_for_models_of_several_kinds_of_input(
    tmp_path: Path, config: dict[str, Any], rendered: str
) -> None:
    folder = model_folder(tmp_path, template="file", chat_template="settings")
    write_json(folder / "chat_template.json", {"chat_template": "processor"})
    write_json(folder / "config.json", config)
    assert Tokenizer.load(folder).chat_template.render(CHAT) == rendered
    assert "chat_template.json" in {piece.file for piece in TokenizerFiles(folder).pieces()}


@pytest.mark.parametrize("content", [{}, {"chat_template": 5}, []])
def test_a_damaged_chat_template_of_a_processor_is_rejected(tmp_path: Path, content: Any) -> None:
    folder = model_folder(tmp_path)
    write_json(folder / "chat_template.json", content)
    write_json(folder / "config.json", {"text_config": {}})
    with pytest.raises(TokenizerLoadError, match=r"chat_template(\.json)? must be"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, CHAT, "has no chat template"),
        (TEMPLATE, Conversation([]), "at least one message"),
        (TEMPLATE, one_message("critic", "42"), "does not render the role 'critic'; .*no critic here"),
        ("{% if %}", CHAT, "is not valid Jinja"),
        ("{{ messages[99].content }}", CHAT, "does not accept"),
        ("{{ messages[0].content + 1 }}", CHAT, "does not accept"),
        ("{{ messages.append(1) }}", CHAT, "does not accept"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "does not accept"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_rejected_with_the_reason(
    tmp_path: Path, template: str | None, messages: Conversation, reason: str
) -> None:
    tokenizer = Tokenizer.load(model_folder(tmp_path, template))
    with pytest.raises(ChatTemplateError, match=reason):
        tokenizer.encode_chat(messages)


def test_a_model_without_a_chat_template_encodes_text(tmp_path: Path) -> None:
    assert Tokenizer.load(model_folder(tmp_path, template=None)).encode("") == [0]


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": "{"}], ids=["missing", "damaged"])
def test_a_missing_or_damaged_tokenizer_is_rejected(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerLoadError, match=r"No tokenizer can be read|tokenizer\.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_loading_a_tokenizer_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from services.gateway.text.tokenizer import Conversation, Tokenizer\n"
        "Tokenizer.load(pathlib.Path(sys.argv[1])).encode_chat(Conversation([{'role': 'user', 'content': 'hi'}]))\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(model_folder(tmp_path))], check=True)
