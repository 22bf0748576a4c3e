"""A constraint describes text: special tokens match none of it, and tokenizers do not change it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from engine.errors import ConstraintFailed
from quire.v1 import decoding_pb2
from services.engine.guided.grammar_sources import GrammarSpec
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from services.engine.guided.tool_calls import source_of
from tests.services.engine.guided.test_grammars import tokens_of

END = "<|im_end|>"
END_ID = 96
CHARACTERS = ["Ġ", "Ċ", *map(chr, range(33, 127))]
Saved = Callable[..., tokenizers.Tokenizer]


@pytest.fixture
def save(tmp_path: Path) -> Saved:
    """Save a tokenizer of bytes with added tokens, and return it as the gateway decodes with it."""

    def saved(special: list[str], shown: list[str], changes: dict[str, Any] | None = None) -> tokenizers.Tokenizer:
        vocabulary = {token: at for at, token in enumerate([*CHARACTERS, END])}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(special)
        made.add_tokens(shown)
        source = json.dumps(json.loads(made.to_str()) | (changes or {}))
        (tmp_path / "tokenizer.json").write_text(source)
        return tokenizers.Tokenizer.from_str(source)

    return saved


def output(folder: Path, backend: tokenizers.Tokenizer, spec: GrammarSpec, ends: list[int]) -> list[int]:
    """Return an output that chooses the first token at each place, until it is complete."""
    state, chosen = CompiledGrammar(Vocabulary(folder, backend.get_vocab_size(), ends), spec).start(), list[int]()
    while True:
        allowed = tokens_of(state.allowed()) - {*ends}
        if not allowed or state.complete:
            return chosen
        chosen.append(min(allowed))
        state.advance(chosen[-1])


def tool_call(name: str, schema: dict[str, Any]) -> GrammarSpec:
    calls = decoding_pb2.ToolCallGrammar(max_calls=1)
    calls.tools.add(name=name, parameters=json.dumps(schema))
    return GrammarSpec("tool_calls", source_of(calls))


def constant(value: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {value: {"const": value}}, "required": [value]}
    return schema | {"additionalProperties": False}


def pattern_of(text: str) -> str:
    return "".join(f"\\{character}" if character in "|[]" else character for character in text)


@pytest.mark.parametrize("name", [END, "<|endoftext|>", "[BOS]", "<think>"])
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (lambda name: GrammarSpec("regex", pattern_of(name) + "yes"), "{}yes"),
        (lambda name: GrammarSpec("json_schema", json.dumps(constant(name))), '{{"{0}":"{0}"}}'),
        (
            lambda name: tool_call(name, constant(name)),
            '<tool_call>\n{{"name": "{0}", "arguments": {{"{0}":"{0}"}}}}\n</tool_call>',
        ),
    ],
    ids=["regex", "schema", "tool"],
)
def test_the_name_of_a_special_token_is_text(
    tmp_path: Path, save: Saved, name: str, spec: Callable[[str], GrammarSpec], text: str
) -> None:
    backend = save([END, "<|endoftext|>", "[BOS]"], ["<think>"])
    ids = output(tmp_path, backend, spec(name), [END_ID])
    assert backend.decode(ids, skip_special_tokens=True).replace(" ", "") == text.format(name).replace(" ", "")
    assert backend.token_to_id(name) not in ids


def test_a_token_that_the_settings_name_as_special_is_no_text(tmp_path: Path, save: Saved) -> None:
    backend = save([], [])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "pad_token": {"content": "~"}}))
    assert len(output(tmp_path, backend, GrammarSpec("regex", pattern_of(END)), [])) == len(END)
    with pytest.raises(ConstraintFailed):
        output(tmp_path, backend, GrammarSpec("regex", "a~"), [END_ID])


def test_calls_have_the_tags_that_the_model_has_as_shown_tokens(tmp_path: Path, save: Saved) -> None:
    backend = save([END], ["<tool_call>", "</tool_call>"])
    ids = output(tmp_path, backend, tool_call("<tool_call>", constant("</tool_call>")), [END_ID])
    names = [backend.id_to_token(token) for token in ids]
    assert (names[0], names[-1]) == ("<tool_call>", "</tool_call>")
    assert not {*names[1:-1]} & {"<tool_call>", "</tool_call>"}


def test_added_tokens_that_are_ordinary_text_stay_in_use(tmp_path: Path, save: Saved) -> None:
    backend = save([END], ["word"])
    ids = output(tmp_path, backend, GrammarSpec("regex", "a word"), [END_ID])
    assert backend.token_to_id("word") in ids


@pytest.mark.parametrize("ends", [[END_ID], []])
def test_without_an_end_of_sequence_token_no_text_ends_an_output(tmp_path: Path, save: Saved, ends: list[int]) -> None:
    backend = save([END], [])
    state = CompiledGrammar(Vocabulary(tmp_path, backend.get_vocab_size(), ends), GrammarSpec("regex", "a+")).start()
    state.advance(a := CHARACTERS.index("a"))
    assert tokens_of(state.allowed()) == {END_ID, a}


SPACES = [" ", *map(chr, range(33, 127))]
PIECES = {"<unk>": 0, END: 1} | {character.replace(" ", "▁"): at for at, character in enumerate(SPACES, 2)}
PIECES |= {"▁b": len(PIECES)}
TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "NFC"}]}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}},
        {
            "pre_tokenizer": None,
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, TO_MARK]},
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
        },
        {
            "pre_tokenizer": METASPACE,
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, METASPACE]},
        },
    ],
    ids=["normalizer", "prefix space", "truncation", "sentencepiece", "metaspace"],
)
def test_a_tokenizer_changes_no_text_of_a_constraint(tmp_path: Path, save: Saved, changes: dict[str, Any]) -> None:
    if "decoder" in changes:
        source = json.loads(save([END], []).to_str())
        changes = changes | {"model": source["model"] | {"vocab": PIECES, "merges": ["▁ b"], "byte_fallback": True}}
        changes["added_tokens"] = [source["added_tokens"][0] | {"id": 1}]
    backend = save([END], [], changes)
    end = int(backend.token_to_id(END) or 0)
    ids = output(tmp_path, backend, GrammarSpec("regex", pattern_of(f"Aa b  {END}")), [end])
    names = [str(backend.id_to_token(token)).replace("Ġ", " ").replace("▁", " ") for token in ids]
    assert "".join(names) == f"Aa b  {END}"
    assert end not in ids
