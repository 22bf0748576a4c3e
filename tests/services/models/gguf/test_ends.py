"""The ends of generations in GGUF files: what the file names, and what has a known name."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest

from services.models.gguf.tokenizer import GgufTokenizer, gguf_tokenizer
from tests.services.models.gguf.made_vocabularies import Vocabulary

NORMAL, CONTROL = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL


def built(folder: Path, named: Sequence[str], kind: int = CONTROL, **ids: int) -> GgufTokenizer:
    """Build the tokenizer of a file with the tokens a, b, ab, <s> and the named ones from 4 on."""
    tokens = ("a", "b", "ab", "<s>", *named)
    types = [NORMAL] * 3 + [CONTROL] + [kind] * len(named)
    keys = {f"{role}_token_id": token for role, token in ids.items()}
    return gguf_tokenizer(Vocabulary("gpt2", tokens, types, merges=["a b"], keys=keys).write(folder / "made.gguf"))


def test_a_chat_ends_at_the_end_of_a_turn_where_the_file_names_another_end_of_the_sequence(tmp_path: Path) -> None:
    assert built(tmp_path, ["<|endoftext|>", "<turn_over>"], eos=4, eot=5).ends == (4, 5)
    assert built(tmp_path, ["<e>", "<message_over>"], eos=4, eom=5).ends == (4, 5)


@pytest.mark.parametrize(
    "name", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>", "<|eom_id|>", "<turn|>"]
)
def test_known_names_end_a_generation_and_have_no_text_whatever_their_type(tmp_path: Path, name: str) -> None:
    found = built(tmp_path, [name], kind=NORMAL, eos=3)
    assert found.ends == (3, 4)
    assert found.backend.encode(f"a{name}b").ids == [0, 4, 1]
    assert found.backend.decode([0, 4, 1]) == "ab"


def test_the_first_end_is_that_of_the_sequence(tmp_path: Path) -> None:
    assert built(tmp_path, ["<|endoftext|>", "<|im_end|>"], eos=5).ends == (5, 4)


def test_files_of_a_repository_end_at_their_separators(tmp_path: Path) -> None:
    assert built(tmp_path, ["<|fim_pad|>", "<reponame>", "<|file_sep|>", "<fim_prefix>"], eos=3).ends == (3, 4, 5, 6)
    assert built(tmp_path, ["<|fim_pad|>", "<pad>"], eos=3, fim_pad=5).ends == (3, 5)


@pytest.mark.parametrize(
    ("others", "ends"),
    [
        (("<|return|>", "<|call|>"), (3, 5, 6)),
        (("<|flush|>", "<|calls|>"), (3, 5, 6)),
        (("<|return|>", "<other>"), (3, 4, 5)),
    ],
)
def test_the_end_of_a_message_is_no_end_where_calls_and_answers_have_their_own(
    tmp_path: Path, others: tuple[str, str], ends: tuple[int, ...]
) -> None:
    assert built(tmp_path, ["<|end|>", *others], eos=3).ends == ends


def test_a_tag_of_html_is_text_where_turns_have_their_own_end(tmp_path: Path) -> None:
    found = built(tmp_path, ["</s>", "<|tool_response>"], eos=3)
    assert found.ends == (3, 5)
    assert found.backend.token_to_id("</s>") not in found.backend.get_added_tokens_decoder()


def test_a_file_without_an_end_of_the_sequence_has_the_ends_with_known_names_only(tmp_path: Path) -> None:
    assert built(tmp_path, ["<|im_end|>"]).ends == (4,)
    assert built(tmp_path, []).ends == ()
