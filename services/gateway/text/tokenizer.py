"""Text into token ids and back, as the tokenizer files of a model folder say.

The file `tokenizer.json` is read by the library `tokenizers` itself: importing that and jinja2 takes 0.08 s, loading a
vocabulary of 49,152 tokens 0.13 s. Transformers' AutoTokenizer does the same with it in 2.6 s and 1.7 s, for it brings
torch along (1.2 s and 0.2 s where torch is not installed). It serves only for folders without the file.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.gateway.text.chat_template import ChatTemplate, Conversation

# How a space is written in vocabularies made by SentencePiece.
_SPACE_MARK = "\u2581"


class TokenizerLoadError(ValueError):
    """A folder holds no tokenizer that can be read."""


class Tokenizer:
    """A model's tokenizer and chat template. Safe to share between threads; encoding lets other threads run.

    Takes `backend` over: its truncation and padding, settings of training, are turned off.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._special_ids = _special_ids(backend)
        self._bytes = _byte_tokens(backend)
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self._byte_alphabet = _byte_alphabet(backend)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face model folder. Raises TokenizerLoadError."""
        try:
            return _read(folder) if (folder / "tokenizer.json").is_file() else _convert(folder)
        except Exception as error:  # `tokenizers` raises nothing more precise
            raise TokenizerLoadError(f"No tokenizer can be read from {folder}: {error}") from error

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_byte_fallback(self) -> bool:
        """Whether characters outside the vocabulary are spelled as tokens of one byte each, such as `<0xE4>`."""
        return bool(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the model expects around it."""
        return self._ids(text, add_special_tokens=True)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template."""
        return self._chat_template

    def encode_chat(self, conversation: Conversation, *, open_turn: bool = True) -> list[int]:
        """Return the ids of the prompt for a conversation. Raises ChatTemplateError."""
        text = self._chat_template.render(conversation, open_turn=open_turn)
        return self._ids(text, add_special_tokens=False)  # the template has written them

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD, ids that do not exist nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether the id stands for a special token, such as the end of a turn."""
        return token_id in self._special_ids

    def is_special_token(self, text: str) -> bool:
        """Whether a text is a special token's name."""
        return self._backend.token_to_id(text) in self._special_ids

    def exists(self, token_id: int) -> bool:
        """Whether the id names a token. A model can give out others where its vocabulary is padded."""
        return self._backend.id_to_token(token_id) is not None

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token adds to a text, special ones by their names; nothing for an id that names no token."""
        if (byte := self._bytes.get(token_id)) is not None:
            return bytes([byte])
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._byte_alphabet and all(character in self._byte_alphabet for character in token):
            return bytes(self._byte_alphabet[character] for character in token)
        return token.replace(_SPACE_MARK, " ").encode()

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte that a token of byte fallback stands for; None for any other token."""
        return self._bytes.get(token_id)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of all ways to encode, this one skips character offsets and lets go of the interpreter lock: for long
        # prompts it takes less than half the time, and the event loop goes on when a thread calls it.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _read(folder: Path) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    named = _named_tokens(settings)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([token for token in named.values() if token not in known])
    templates = _chat_templates(folder, settings)
    return Tokenizer(backend, ChatTemplate(templates.get("default"), named, templates.get("tool_use")))


def _convert(folder: Path) -> Tokenizer:
    """Make a fast tokenizer of the older files, such as `vocab.json` or `tokenizer.model`."""
    from transformers import AutoTokenizer  # seconds to import

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    templates = _by_name(loaded.chat_template)
    template = ChatTemplate(templates.get("default"), loaded.special_tokens_map, templates.get("tool_use"))
    return Tokenizer(loaded.backend_tokenizer, template)


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Find the special tokens by role: `bos_token`, `eos_token` and whatever else is called so."""
    contents = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    return {name: content for name, content in contents.items() if content is not None}


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    templates = settings.get("chat_template")
    if isinstance(templates, list):
        templates = {template["name"]: template["template"] for template in templates}
    return _by_name(templates)


def _by_name(templates: str | Mapping[str, str] | None) -> Mapping[str, str]:
    return {"default": templates} if isinstance(templates, str) else templates or {}


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Bytes by the id of their token; empty where the decoder does not know byte tokens."""
    if backend.decoder is None or b'"ByteFallback"' not in backend.decoder.__getstate__():
        return {}
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {token_id: byte for byte, token_id in ids.items() if token_id is not None}


def _byte_alphabet(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Bytes by the characters that a byte-level vocabulary writes them with; empty for other vocabularies.

    Printable characters of Latin-1 stand for themselves, the other bytes in their order for those from U+0100 on.
    """
    if backend.decoder is None or b'"ByteLevel"' not in backend.decoder.__getstate__():
        return {}
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
