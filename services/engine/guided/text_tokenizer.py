"""A copy of a model's tokenizer, for llguidance, in which no text is a special token and text stays as it is.

A constraint describes text. llguidance excludes special tokens from masks, but where only one text can follow, it asks
the tokenizer for its tokens: `<|im_end|>` would become the token that ends an answer. So in the copy these tokens have
names that no constraint contains. Parts that change a text, such as Unicode normalization, are left out: the tokens of
the changed text would not match.
"""

import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

_Node = dict[str, Any]
_SPACE = {"String": " "}


class TextTokenizer(NamedTuple):
    """`source` is the copy in the format of `tokenizer.json`. `hidden` are the ids that match no text."""

    source: str
    hidden: frozenset[int]


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer; older formats, such as `vocab.json` and `tokenizer.model`, are converted.

    Raises the errors of `tokenizers` and transformers.
    """
    if (file := folder / "tokenizer.json").is_file():
        return tokenizers.Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer  # takes seconds unless the engine has imported it

    backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    return backend


def text_tokenizer(backend: tokenizers.Tokenizer, special: Iterable[int]) -> TextTokenizer:
    """Make the copy. `special` are ids that it hides besides the added tokens that are no ordinary text."""
    description: _Node = json.loads(backend.to_str())
    byte_level = '"ByteLevel"' in json.dumps(description["decoder"])
    added: list[_Node] = description["added_tokens"]
    hidden = {token["id"] for token in added if not _is_text(token, byte_level)} | set(special)
    nonce = secrets.token_hex(16)
    contents = {at: content for at in hidden if (content := backend.id_to_token(at)) is not None}
    names = {content: f"<{nonce} {at}>" for at, content in contents.items()}
    kept = [token for token in added if token["id"] not in contents]
    description["added_tokens"] = sorted(
        [*kept, *(_special_token(at, names[content]) for at, content in contents.items())],
        key=lambda token: token["id"],
    )
    _rename(description["model"], names)
    description["normalizer"] = _spaces_alone(description["normalizer"])
    _add_no_space(description["pre_tokenizer"])
    description["decoder"] = _with_spaces(description["decoder"])
    # These would add tokens to a text, or cut it.
    description |= {"post_processor": None, "truncation": None, "padding": None}
    return TextTokenizer(json.dumps(description), frozenset(contents))


def _is_text(token: _Node, byte_level: bool) -> bool:
    """Return True if an added token is ordinary text, such as a run of spaces, and llguidance reads its bytes."""
    content: str = token["content"]
    tagged = content.startswith("<") and content.endswith(">")  # special for llguidance
    return not (token["special"] or tagged or token["lstrip"] or token["rstrip"]) and (
        content.isascii() or not byte_level
    )


def _special_token(token_id: int, name: str) -> _Node:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": name, **flags}


def _rename(model: _Node, names: dict[str, str]) -> None:
    """Rename tokens of a vocabulary, so that they keep their ids, and drop merges that make or take them."""
    vocabulary: dict[str, int] | list[list[Any]] = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): at for token, at in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if unknown := model.get("unk_token"):
        model["unk_token"] = names.get(unknown, unknown)
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_tokens_of(merge))]


def _tokens_of(merge: str | list[str]) -> tuple[str, str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second, first + second


def _spaces_alone(normalizer: _Node | None) -> _Node | None:
    """Keep of a normalizer what replaces spaces by the character that vocabularies of SentencePiece have for them."""
    if normalizer is None:
        return None
    if normalizer["type"] == "Sequence":
        parts = [part for one in normalizer["normalizers"] if (part := _spaces_alone(one)) is not None]
        return {"type": "Sequence", "normalizers": parts} if parts else None
    return normalizer if normalizer["type"] == "Replace" and normalizer["pattern"] == _SPACE else None


def _add_no_space(pre_tokenizer: _Node | None) -> None:
    """Keep a pre-tokenizer from putting a space before a text. llguidance does so for the type Metaspace."""
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] == "ByteLevel":
        pre_tokenizer["add_prefix_space"] = False
    for one in pre_tokenizer.get("pretokenizers", ()):
        _add_no_space(one)


def _with_spaces(decoder: _Node | None) -> _Node | None:
    """Write a decoder of type Metaspace as llguidance reads it."""
    if decoder is None:
        return None
    if decoder["type"] == "Sequence":
        return decoder | {"decoders": [_with_spaces(one) for one in decoder["decoders"]]}
    if decoder["type"] == "Metaspace":
        return {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    return decoder
