"""Which of a folder's templates is used, and what of them is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.engine.startup.tokenizer_files import TokenizerFiles
from services.models.files.chat_templates import InvalidTemplate, read_templates, restore_folders
from services.models.files.template_language import MAX_SOURCE_CHARACTERS, compile_template
from tests.services.gateway.text.test_detokenizer import byte_level

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "sum", "description": "", "parameters": {}}}
LISTED = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "listed tools\n"}]
FILES = {"chat_template.jinja": "file\r\n.", "additional_chat_templates/tool_use.jinja": "file tools"}


def folder_of(folder: Path, files: dict[str, str], setting: Any = None) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend"} | ({"chat_template": setting} if setting else {})
    contents = {"tokenizer_config.json": json.dumps(settings), "config.json": '{"model_type": "llama"}'}
    for name, content in (contents | files).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode())
    return folder


def only(*names: str) -> dict[str, str]:
    return {name: FILES[name] for name in names}


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["without tools", "with tools"])
@pytest.mark.parametrize(
    ("files", "setting"),
    [
        ({}, "setting"),
        ({}, LISTED),
        (FILES, None),
        (FILES, LISTED),
        (only("chat_template.jinja"), LISTED),
        ({**FILES, "additional_chat_templates/default.jinja": "named default"}, None),
        ({**FILES, "additional_chat_templates/rag.jinja": "{% if %}"}, None),
        ({"additional_chat_templates/default.jinja": "named default"}, "setting"),
    ],
)
def test_the_template_is_that_of_transformers(
    tmp_path: Path, files: dict[str, str], setting: Any, tools: list[Any] | None
) -> None:
    folder = folder_of(tmp_path, files, setting)
    templates = read_templates(folder, setting)
    templates.check()
    used = templates.tool_use if tools and templates.tool_use else templates.default
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(USER, tools=tools, tokenize=False)
    assert used
    assert compile_template(used.text).render() == expected


def test_named_templates_without_a_default_are_for_tools_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, only("additional_chat_templates/tool_use.jinja"), "setting")
    templates = read_templates(folder, "setting")
    assert templates.default is None
    assert templates.tool_use
    with pytest.raises(ValueError, match="no default"):
        AutoTokenizer.from_pretrained(folder).apply_chat_template(USER, tokenize=False)


def test_gateways_receive_named_templates_in_their_folder(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    folder_of(source, FILES)
    for piece in TokenizerFiles(source).pieces():
        with (target / piece.file).open("ab") as file:
            file.write(piece.content)
    restore_folders(target)
    assert read_templates(target, None) == read_templates(source, None)


@pytest.mark.parametrize(
    ("files", "setting", "fault"),
    [
        ({"chat_template.jinja": "a\nb{% if %}"}, None, "^chat_template.jinja: line 2: Expected an expression"),
        (
            {"additional_chat_templates/tool_use.jinja": "\n\n{{"},
            None,
            "^additional_chat_templates/tool_use.jinja: line 3",
        ),
        ({}, "{{ a | nothing }}", "^tokenizer_config.json: chat_template: line 1: No filter named 'nothing'"),
        ({}, [{"name": "default", "template": "{% nope %}"}], r"chat_template\[0\]: line 1: Encountered unknown tag"),
        ({}, "a" * (MAX_SOURCE_CHARACTERS + 1), "must have at most 131,072 characters, not 131,073"),
        ({}, "{{ " + "(" * 50_000, "nested too deeply"),
        ({}, "{% for a in b %}" * 60 + "{% endfor %}" * 60, "cannot be compiled: too many"),
        ({}, "{{ " + "9" * 10_000 + " }}", "cannot be compiled: Exceeds the limit"),
    ],
)
def test_a_template_that_is_no_jinja_is_refused_by_file_and_line(
    tmp_path: Path, files: dict[str, str], setting: Any, fault: str
) -> None:
    templates = read_templates(folder_of(tmp_path, files, setting), setting)
    with pytest.raises(InvalidTemplate, match=fault):
        templates.check()


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidTemplate, match=r"^chat_template.jinja: it is not UTF-8"):
        read_templates(tmp_path, None)


def test_at_most_64_named_templates_are_read(tmp_path: Path) -> None:
    files = {f"additional_chat_templates/{at}.jinja": "x" for at in range(65)}
    with pytest.raises(InvalidTemplate, match="at most 64 templates, not 65"):
        read_templates(folder_of(tmp_path, files), None)


@pytest.mark.parametrize("expression", ["'a' * 10**10", "'a' | center(10**10)", "10**10**10", "range(10**9) | list"])
def test_compiling_computes_nothing(expression: str) -> None:
    compile_template("{{ EXPRESSION }}{% set a = EXPRESSION %}".replace("EXPRESSION", expression))
