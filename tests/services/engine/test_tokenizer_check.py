"""An engine whose gateways could not use its tokenizer does not start."""

from pathlib import Path

import pytest

from engine.errors import ModelUnsupported
from services.engine.ranks.start import assemble
from services.engine.settings import EngineSettings
from tests.services.gateway.text.test_detokenizer import byte_level


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, "No tokenizer can be read"),
        ({"tokenizer.json": '{"model": '}, "tokenizer.json is not valid JSON"),
        ({"tokenizer_config.json": "[" * 100_000}, "tokenizer_config.json is nested more than 200 levels deep"),
        (
            {"tokenizer_config.json": '{"extra_special_tokens": 5}'},
            "tokenizer_config.json: extra_special_tokens must be",
        ),
        ({"chat_template.jinja": "\n{% endfor %}"}, "chat_template.jinja: line 2: Encountered unknown tag 'endfor'"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_is_refused_with_the_reason(
    tmp_path: Path, files: dict[str, str], fault: str
) -> None:
    if files:
        byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelUnsupported, match=f"^{tmp_path.name}: {fault}"):
        assemble(EngineSettings(model=str(tmp_path), kvmanager="127.0.0.1:1"))
