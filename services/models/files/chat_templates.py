"""Reads the chat templates of a model folder, and chooses among them as Hugging Face Transformers does.

`chat_template.jinja` is the template `default`, `additional_chat_templates/NAME.jinja` the template NAME. Folders with
one of these files do not use `chat_template` of `tokenizer_config.json`: a text, which is the default, or a list of
names and templates. A processor's `chat_template.json` replaces all of them. Conversations with tools get the template
`tool_use` if there is one, all others the default.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from services.models.files.template_language import MAX_SOURCE_CHARACTERS, InvalidTemplate, compile_template
from services.models.processor_template import processor_template

# The folder of named templates.
_ADDITIONAL = "additional_chat_templates"
_FILE_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_FILE = "chat_template.jinja"
_SETTING = "tokenizer_config.json: chat_template"
_MAX_NAMED = 64


class TemplateSource(NamedTuple):
    """The text of a template, and the file or setting that it was read from."""

    text: str
    origin: str

    def check(self) -> None:
        """Raise InvalidTemplate, with origin and line, unless the text is Jinja."""
        try:
            compile_template(self.text)
        except InvalidTemplate as error:
            raise InvalidTemplate(f"{self.origin}: {error}") from error


class ChatTemplates(NamedTuple):
    """The templates that a model uses; None for one that it does not have."""

    default: TemplateSource | None = None
    tool_use: TemplateSource | None = None

    def check(self) -> None:
        """Raise InvalidTemplate, with origin and line, unless all are Jinja."""
        for source in (self.default, self.tool_use):
            if source:
                source.check()


def read_templates(folder: Path, setting: Any) -> ChatTemplates:
    """Read the templates of a folder whose `tokenizer_config.json` has this `chat_template`.

    Does not compile them. Raises InvalidTemplate, ValueError and OSError.
    """
    if (own := processor_template(folder)) is not None:
        return ChatTemplates(TemplateSource(own, "chat_template.json"))
    sources = dict(_of_files(folder)) or dict(_of_setting(setting))
    return ChatTemplates(sources.get("default"), sources.get("tool_use"))


def additional_files(folder: Path) -> list[Path]:
    """Return the files of named templates in the order of their names.

    A template whose name has other characters than letters, digits, dots, dashes and underscores is not used.
    Raises InvalidTemplate for too many.
    """
    found = sorted(path for path in (folder / _ADDITIONAL).glob("*.jinja") if _FILE_NAME.fullmatch(path.name))
    if len(found) > _MAX_NAMED:
        raise InvalidTemplate(f"{_ADDITIONAL} must have at most {_MAX_NAMED} templates, not {len(found)}")
    return [path for path in found if path.is_file()]


def transfer_name(path: Path) -> str:
    """Return the name without folder under which a file of a named template is sent to gateways."""
    return f"{_ADDITIONAL}.{path.name}"


def restore_folders(folder: Path) -> None:
    """Move files of named templates from their names in a transfer into their folder."""
    for path in sorted(folder.glob(f"{_ADDITIONAL}.*.jinja")):
        (folder / _ADDITIONAL).mkdir(exist_ok=True)
        path.rename(folder / _ADDITIONAL / path.name.removeprefix(f"{_ADDITIONAL}."))


def _of_files(folder: Path) -> Iterator[tuple[str, TemplateSource]]:
    """Yield names and templates."""
    if (path := folder / _FILE).is_file():
        yield "default", _read(path, _FILE)
    for path in additional_files(folder):
        yield path.name.removesuffix(".jinja"), _read(path, f"{_ADDITIONAL}/{path.name}")


def _read(path: Path, origin: str) -> TemplateSource:
    with path.open("rb") as file:
        content = file.read(4 * MAX_SOURCE_CHARACTERS + 1)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidTemplate(f"{origin}: it is not UTF-8, or too long") from error
    return TemplateSource(text.replace("\r\n", "\n").replace("\r", "\n"), origin)


def _of_setting(setting: Any) -> Iterator[tuple[str, TemplateSource]]:
    """Yield names and templates."""
    if isinstance(setting, str):
        yield "default", TemplateSource(setting, _SETTING)
        return
    entries = [] if setting is None else setting
    if not isinstance(entries, list) or len(entries) > _MAX_NAMED:
        raise InvalidTemplate(f"{_SETTING} must be a text, or a list of at most {_MAX_NAMED} named templates")
    for at, entry in enumerate(entries):
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidTemplate(f"{_SETTING}[{at}] must have the texts name and template")
        yield name, TemplateSource(text, f"{_SETTING}[{at}]")
