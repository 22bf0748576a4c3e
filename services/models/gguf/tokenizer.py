"""The tokenizer of a GGUF file, built from the file's own metadata as llama.cpp reads it.

The converter of transformers takes vocabulary and merges, and drops the rest: how texts are split, flags, and ends of
turns. So it tokenizes numbers and whitespace otherwise than the model was trained with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from engine.errors import ModelUnsupported
from services.models.gguf.byte_pairs import byte_pair_tokenizer, split_of
from services.models.gguf.ends import TokenRoles, token_roles
from services.models.gguf.metadata import MODEL, TEMPLATE, TokenizerMetadata, read_metadata
from services.models.gguf.sentencepiece import merging_tokenizer, unigram_tokenizer
from services.models.gguf.word_pieces import word_piece_tokenizer

_Build = Callable[[TokenizerMetadata, TokenRoles], Tokenizer]


@dataclass(frozen=True)
class _Kind:
    """A value of `tokenizer.ggml.model`: how it is built, ids of files that name none, and what surrounds a text."""

    build: _Build
    ids: Mapping[str, int]
    adds_bos: bool = False
    adds_eos: bool = False


def _byte_pairs(metadata: TokenizerMetadata, _roles: TokenRoles) -> Tokenizer:
    return byte_pair_tokenizer(metadata)


# llama.cpp assumes token 11 as BOS and EOS of BPE vocabularies, which is a comma in GPT-2's.
_KINDS = {
    "gpt2": _Kind(_byte_pairs, {}),
    "gemma4": _Kind(_byte_pairs, {}),
    "whitespace": _Kind(_byte_pairs, {}),
    "llama": _Kind(
        lambda metadata, roles: merging_tokenizer(metadata, roles.special), {"bos": 1, "eos": 2, "unknown": 0}, True
    ),
    "t5": _Kind(
        lambda metadata, _roles: unigram_tokenizer(metadata), {"eos": 1, "unknown": 2, "padding": 0}, adds_eos=True
    ),
    "bert": _Kind(
        lambda metadata, roles: word_piece_tokenizer(metadata, roles.special | roles.user_defined),
        {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
        adds_bos=True,
        adds_eos=True,
    ),
}
# The names of special tokens in a Hugging Face folder, by those in the file.
_ROLES = {
    **{role: f"{role}_token" for role in ("bos", "eos", "cls", "mask")},
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
}


@dataclass(frozen=True)
class GgufTokenizer:
    """A file's tokenizer, the settings beside it in a Hugging Face folder, and the ids that end a generation."""

    backend: Tokenizer
    settings: dict[str, Any]
    ends: tuple[int, ...]


def gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Build the tokenizer of a file. Raises ModelUnsupported, with the key, if it is damaged or of an unknown kind."""
    metadata = read_metadata(path)
    kind = _KINDS.get(metadata.model)
    if kind is None and MODEL not in metadata.header.metadata:
        raise ModelUnsupported(f"it has no {MODEL}")
    if kind is None:
        raise ModelUnsupported(f"its {MODEL} is {metadata.model[:80]!r}, but only {', '.join(_KINDS)} are read")
    ids = {role: found for role in _ROLES if (found := metadata.token(role, kind.ids.get(role))) is not None}
    roles = token_roles(metadata, ids.get("eos"))
    backend = kind.build(metadata, roles)
    _add_tokens(backend, metadata, roles)
    backend.post_processor = _surroundings(metadata, kind, ids)
    return GgufTokenizer(backend, _settings(metadata, ids), roles.ends)


def _add_tokens(backend: Tokenizer, metadata: TokenizerMetadata, roles: TokenRoles) -> None:
    """Let the tokens that are no text, and those that users have defined, be found before a text is split."""
    strips_right, strips_left = _stripping(metadata)
    added = sorted(roles.special | roles.user_defined)
    tokens = [
        AddedToken(
            metadata.tokens[one],
            lstrip=metadata.tokens[one] in strips_left,
            rstrip=strips_right and metadata.tokens[one] not in ("<unk>", "<s>", "<|endoftext|>"),
            normalized=False,
            special=one in roles.special,
        )
        for one in added
    ]
    backend.add_tokens(tokens)


def _stripping(metadata: TokenizerMetadata) -> tuple[bool, tuple[str, ...]]:
    """Return whether tokens take the whitespace behind them, and which take what is before. No key says so."""
    split, name = metadata.text("tokenizer.ggml.pre") or "", (metadata.text("general.name") or "").lower()
    multilingual = metadata.header.architecture in ("nomic-bert-moe", "jina-bert-v3")
    if multilingual or any(one in split for one in ("jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert")):
        return False, ("<mask>",)
    if "phi-3" in name or "phi3" in name:
        return True, ()
    return False, ("[MASK]",) if "modern-bert" in name else ()


def _surroundings(metadata: TokenizerMetadata, kind: _Kind, ids: Mapping[str, int]) -> processors.PostProcessor:
    """Return the stage that adds the tokens before and after a text, as the file's flags say."""
    first, last = ("bos", "seperator") if metadata.model == "bert" else ("bos", "eos")
    begin = [first] if _adds_bos(metadata, kind) else []
    end = [last] if metadata.model == "bert" or metadata.flag("add_eos_token", kind.adds_eos) else []
    for role in (*begin, *end):
        if role not in ids:
            raise ModelUnsupported(f"it adds the token {role} to texts, but has no tokenizer.ggml.{role}_token_id")
    tokens = [{"id": role, "ids": [ids[role]], "tokens": [metadata.tokens[ids[role]]]} for role in (*begin, *end)]
    one = [*begin, "$A", *end]
    return processors.TemplateProcessing(single=one, pair=[*one, "$B:1", *end], special_tokens=tokens)


def _adds_bos(metadata: TokenizerMetadata, kind: _Kind) -> bool:
    if kind.build is not _byte_pairs:
        return metadata.model == "bert" or metadata.flag("add_bos_token", kind.adds_bos)
    split = split_of(metadata)
    return metadata.flag("add_bos_token", split.adds_bos) or split.needs_bos


def _settings(metadata: TokenizerMetadata, ids: Mapping[str, int]) -> dict[str, Any]:
    settings: dict[str, Any] = {_ROLES[role]: metadata.tokens[token] for role, token in ids.items()}
    if template := metadata.text(TEMPLATE):
        settings["chat_template"] = template
    return settings | {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
