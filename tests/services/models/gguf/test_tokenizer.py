"""What a GGUF tokenizer does with texts beside splitting them: special tokens, whitespace, and the way back to text."""

import json
from pathlib import Path

import gguf
import pytest

from services.gateway.text.tokenizer import Tokenizer
from services.models.gguf.tokenizer import gguf_tokenizer
from services.models.gguf_conversion import convert
from tests.gguf_models import MIXED, write_llama
from tests.services.models.gguf.made_vocabularies import vocabularies
from tests.services.models.gguf.texts import texts

# Of SmolLM2's own tokenizer, and of llama.cpp.
AUTHORS_IDS = {
    "a  1": [81, 256, 33],
    "Steps:\n\n1. Mix": [21831, 42, 1116, 33, 30, 18212],
    "x\t\t7": [104, 1656, 39],
    "\n\n\n12": [16506, 33, 34],
    "1  2": [33, 256, 34],
}


@pytest.mark.parametrize("text", AUTHORS_IDS)
def test_the_demo_model_reads_digits_and_whitespace_as_its_authors_do(demo_model: Path, text: str) -> None:
    assert Tokenizer.load(demo_model).encode(text) == AUTHORS_IDS[text]


@pytest.mark.parametrize("name", ["bpe qwen2", "bpe deepseek-v3", "gemma4", "merging without prefix"])
def test_tokens_give_back_their_text(tmp_path: Path, name: str) -> None:
    backend = gguf_tokenizer(vocabularies()[name].write(tmp_path / "made.gguf")).backend
    # A mark of SentencePiece is a space in the way back.
    plain = [text for text in texts() if "\u2581" not in text and "<|" not in text]
    encoded = backend.encode_batch_fast(plain, add_special_tokens=False)
    assert [backend.decode(one.ids) for one in encoded] == plain


def test_user_defined_tokens_are_text_and_control_tokens_are_not(tmp_path: Path) -> None:
    backend = gguf_tokenizer(vocabularies()["bpe qwen2"].write(tmp_path / "made.gguf")).backend
    tool, turn = backend.token_to_id("<tool>"), backend.token_to_id("<|im_start|>")
    ids = backend.encode("<|im_start|><tool>", add_special_tokens=False).ids
    assert ids == [turn, tool]
    assert backend.decode(ids) == "<tool>"
    assert backend.decode(ids, skip_special_tokens=False) == "<|im_start|><tool>"


def test_tokens_of_phi_3_take_the_whitespace_behind_them(tmp_path: Path) -> None:
    backend = gguf_tokenizer(vocabularies()["merging phi-3"].write(tmp_path / "made.gguf")).backend
    end, start = backend.token_to_id("<|im_end|>"), backend.token_to_id("<s>")
    assert backend.encode("<|im_end|> \n a").ids == backend.encode("<|im_end|>a").ids
    assert backend.encode("<|im_end|>a").ids[0] == end
    assert backend.encode("<s> \n a").ids != backend.encode("<s>a").ids
    assert backend.encode("<s> a").ids[0] == start


def test_a_converted_folder_has_the_ends_of_turns_and_the_settings_of_the_file(tmp_path: Path) -> None:
    def ends_elsewhere(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(7)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")

    folder = tmp_path / "folder"
    convert(write_llama(tmp_path / "tiny.gguf", MIXED, change=ends_elsewhere), folder)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2, 7]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["bos_token"]) == ("<|endoftext|>", "<|im_start|>")
    assert settings["model_max_length"] == 128
    loaded = Tokenizer.load(folder)
    assert loaded.encode("ab")[0] == 1
    assert loaded.chat_template is not None
    assert (folder / "chat_template.jinja").read_text().startswith("{{ bos_token }}")
