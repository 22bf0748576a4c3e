"""Encodes text and decodes token ids with the tokenizer files of a model folder.

The library `tokenizers` reads `tokenizer.json` directly: import of it and of jinja2 takes 0.08 s, load of a vocabulary
of 49,152 tokens 0.13 s. Transformers' AutoTokenizer takes 2.6 s and 1.7 s because it imports torch (1.2 s and 0.2 s
without torch installed). It is used only for folders without `tokenizer.json`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import tokenizers

from services.gateway.dialects.selection import UNSELECTED, DialectSelection
from services.gateway.text.chat_renderer import ChatRenderer
from services.gateway.text.chat_template import ChatTemplate, Conversation
from services.gateway.text.dialect_tokens import DialectTokens
from services.gateway.text.literal_text import LiteralText
from services.models.files.tokenizer_loading import InvalidTokenizer, load_tokenizer
from services.models.token_bytes import BYTE_CHARACTERS, TokenBytes, token_bytes

# The character for a space in SentencePiece vocabularies.
_SPACE_MARK = "\u2581"

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenizerLoadError(ValueError):
    """The folder has no tokenizer, or the tokenizer cannot be read."""


class TextTooLong(ValueError):
    """A text of `size` bytes surely has more tokens than allowed: their text has at most `most` bytes."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"The text must have at most {most} bytes, not {size}.")
        self.size = size
        self.most = most


class RenderedChat(NamedTuple):
    """A conversation as a text of `characters`; `encode` returns its token ids."""

    characters: int
    encode: Callable[[], list[int]]


class Tokenizer:
    """A model's tokenizer and chat template. Thread-safe; encoding releases the interpreter lock.

    Owns `backend` and turns off its truncation and padding, which are settings of training.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate, selection: DialectSelection = UNSELECTED
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._chat = ChatRenderer(chat_template, selection)
        self._literal = LiteralText(backend, self._names_of_template)
        self._special_ids = _special_ids(backend)
        self._bytes = _byte_tokens(backend)
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self._byte_alphabet = _byte_alphabet(backend)
        self._is_concatenative = _is_concatenative(backend)
        self._texts = {skip: _TokenTexts(self, skip) for skip in (False, True)}

    @classmethod
    def load(cls, folder: Path, selection: DialectSelection = UNSELECTED) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face model folder. Raises TokenizerLoadError."""
        try:
            loaded = load_tokenizer(folder)
        except InvalidTokenizer as error:
            raise TokenizerLoadError(str(error)) from error
        default, tools = loaded.templates
        template = ChatTemplate(default and default.text, loaded.named, tools and tools.text)
        made = cls(loaded.backend, template, selection)
        made.chat.features.find()
        _ = made.dialect_tokens.are_special, made.identity  # found now, so that nothing waits for them
        return made

    @cached_property
    def identity(self) -> bytes:
        """The same for files that give the same tokens and texts, whatever else they have."""
        texts = (self._backend.to_str(), *self._chat_template.texts)
        return hashlib.sha256(json.dumps(texts).encode("utf-8", "surrogatepass")).digest()

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_byte_fallback(self) -> bool:
        """Whether characters outside the vocabulary are encoded as single-byte tokens such as `<0xE4>`."""
        return bool(self._bytes)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Encode a text, with the special tokens that the model expects around it.

        Raises TextTooLong, before the work, if its size shows that it has more than `most` tokens.
        """
        self._check_size(text, most)
        return self._ids(text, add_special_tokens=True)

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without the special tokens around a prompt."""
        return [one.ids for one in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def special_tokens_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that `encode` adds before and after a text."""
        bare, full = self._ids("a", add_special_tokens=False), self._ids("a", add_special_tokens=True)
        start = next(at for at in range(len(full)) if full[at : at + len(bare)] == bare)
        return full[:start], full[start + len(bare) :]

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template."""
        return self._chat_template

    @property
    def chat(self) -> ChatRenderer:
        """The renderer of conversations."""
        return self._chat

    @cached_property
    def dialect_tokens(self) -> DialectTokens:
        """The tokens that mark thoughts and calls."""
        return DialectTokens(self, self._chat.dialect)

    def encode_chat(self, conversation: Conversation, most: int | None = None) -> list[int]:
        """Render and encode a conversation. Special tokens in its texts are text.

        Raises ChatTemplateError, and TextTooLong as `encode` does.
        """
        return self.render_chat(conversation, most).encode()

    def render_chat(self, conversation: Conversation, most: int | None = None) -> RenderedChat:
        """Do what `encode_chat` does before it encodes."""
        text = self._chat.render(conversation)
        self._check_size(text, most)
        marked = self._literal.mark(conversation, self._chat.knows)
        if marked is None:
            # The template already contains the special tokens around a text.
            return RenderedChat(len(text), partial(self._ids, text, add_special_tokens=False))
        marked_text = self._chat.render(marked.conversation)
        return RenderedChat(len(marked_text), partial(self._literal.encode, marked_text, marked.mark))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids. Bytes that are not UTF-8 become U+FFFD; unknown ids are skipped."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def texts(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """Return the text of each token id, computed once: empty for ids without text, None if other tokens change it.

        With a decoder for byte-level vocabularies only tokens with incomplete characters depend on others, with any
        other decoder all do.
        """
        return self._texts[skip_special_tokens]

    @property
    def is_concatenative(self) -> bool:
        """Whether the text of complete characters does not depend on the tokens around them."""
        return self._is_concatenative

    def is_special(self, token_id: int) -> bool:
        """Return True if the id is a special token, such as the end of a turn."""
        return token_id in self._special_ids

    def exists(self, token_id: int) -> bool:
        """Return True if the id is a token. Models with a padded vocabulary can generate other ids."""
        return self._backend.id_to_token(token_id) is not None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token: the name of an added token, nothing for an unknown id."""
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

    def entry_of(self, token_id: int) -> str:
        """Return the entry of a token in the vocabulary; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte of a byte-fallback token, and None for any other token."""
        return self._bytes.get(token_id)

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return token_bytes(json.loads(self._backend.to_str()))

    def _check_size(self, text: str, most: int | None) -> None:
        # A character has at most four bytes. Most texts are short, and then the vocabulary is not searched.
        if most is None or len(text) <= most // 4 or self._token_bytes is None:
            return
        size, limit = self._token_bytes.size(text), most * self._token_bytes.most
        if size > limit:
            raise TextTooLong(size, limit)

    def _names_of_template(self) -> frozenset[int]:
        return self._added_ids.intersection(self._ids(self._chat.features.frame, add_special_tokens=False))

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call computes no character offsets and releases the interpreter lock. For long prompts it takes
        # less than half the time, and the event loop can run while a thread encodes.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class _TokenTexts(dict[int, str | None]):
    """The texts of the tokens seen so far: a call of the library for each generated token costs more than the rest."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        if not self._tokenizer.exists(token_id):
            return ""  # and not stored, because an engine could send any number of unknown ids
        text = self[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str | None:
        tokenizer = self._tokenizer
        if self._skip_special_tokens and tokenizer.is_special(token_id):
            return ""
        text = tokenizer.decode([token_id], self._skip_special_tokens) if tokenizer.is_concatenative else REPLACEMENT
        return None if REPLACEMENT in text else text


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Return the byte of each byte-fallback token; empty for a decoder without byte fallback."""
    if backend.decoder is None or b'"ByteFallback"' not in backend.decoder.__getstate__():
        return {}
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {token_id: byte for byte, token_id in ids.items() if token_id is not None}


def _is_concatenative(backend: tokenizers.Tokenizer) -> bool:
    """Return True for the decoder of byte-level vocabularies alone, which joins the bytes of all tokens."""
    return backend.decoder is not None and json.loads(backend.decoder.__getstate__())["type"] == "ByteLevel"


def _byte_alphabet(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary; empty for other vocabularies."""
    if backend.decoder is None or b'"ByteLevel"' not in backend.decoder.__getstate__():
        return {}
    return {character: byte for byte, character in BYTE_CHARACTERS.items()}
