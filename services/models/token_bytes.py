"""How many bytes of text one token of a tokenizer can stand for: with it a text is too long before it is tokenized.

Tokens lose no byte of a text where the configuration in `tokenizer.json` says so for each stage:

* The normalizer shrinks no text, or at most by the factor of a Unicode form.
* No added token takes the whitespace around it, however much there is.
* The pre-tokenizer splits, and removes nothing.
* The model is BPE or Unigram and has tokens for single bytes. Without these an unknown word of any length is one token,
  or none. Bytes that have no token, such as control characters, are lost and do not count.

The text of n tokens has then at most n times the bytes of the longest token. For any other configuration there is no
bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_Part = Mapping[str, Any]


def _byte_characters() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


# The character of each byte in byte-level vocabularies (GPT-2's alphabet): printable Latin-1 bytes are written as
# themselves, the others in order as the characters from U+0100.
BYTE_CHARACTERS = _byte_characters()

# A character of a normal form stands for at most this many times its bytes: U+1FBE U+0308 U+0301 (7 bytes) becomes
# U+0390 (2 bytes), U+1D400 (4 bytes) becomes an A.
_UNICODE_FORMS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4}
_LOSSLESS_NORMALIZERS = ("Prepend", "ByteLevel")
_LOSSLESS_SPLITS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
_NO_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


@dataclass(frozen=True)
class TokenBytes:
    """`most` is how many bytes a token stands for at most. The bytes `lost` of a text are in no token."""

    most: int
    lost: bytes

    def size(self, text: str) -> int:
        """Return how many bytes of a text are in its tokens."""
        return len(text.encode().translate(None, self.lost))


def token_bytes(tokenizer: _Part) -> TokenBytes | None:
    """Return the bound of a tokenizer, None if it has none. `tokenizer` is the content of `tokenizer.json`."""
    shrinks = _shrinkage(tokenizer.get("normalizer"))
    added: list[_Part] = tokenizer.get("added_tokens") or []
    if shrinks is None or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    if not _keeps_all(tokenizer.get("pre_tokenizer")):
        return None
    found = _entries(tokenizer)
    if found is None or (shrinks > 1 and found.lost):  # normal forms are not compared with the lost bytes
        return None
    longest = max([found.most, *(len(token["content"].encode()) for token in added)])
    return TokenBytes(shrinks * longest, found.lost)


def _shrinkage(normalizer: _Part | None) -> int | None:
    """Return the factor by which a normalizer shrinks a text at most, None if it is unknown."""
    if normalizer is None or normalizer["type"] in _LOSSLESS_NORMALIZERS:
        return 1
    if normalizer["type"] == "Sequence":
        product = 1
        for part in normalizer["normalizers"]:
            if (factor := _shrinkage(part)) is None:
                return None
            product *= factor
        return product
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode()) else None
    return _UNICODE_FORMS.get(normalizer["type"])


def _keeps_all(pre_tokenizer: _Part | None) -> bool:
    if pre_tokenizer is None or pre_tokenizer["type"] in _LOSSLESS_SPLITS:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] in ("Split", "Punctuation") and pre_tokenizer["behavior"] != "Removed"


def _entries(tokenizer: _Part) -> TokenBytes | None:
    """Return the bound of a vocabulary with single bytes, None for another vocabulary."""
    model = tokenizer["model"]
    if model.get("type") not in ("BPE", "Unigram"):
        return None
    entries = set(model["vocab"] if model["type"] == "BPE" else [entry for entry, _ in model["vocab"]])
    if _contains(tokenizer, "ByteLevel"):
        lost = {byte for byte, character in BYTE_CHARACTERS.items() if character not in entries}
        return TokenBytes(max(map(len, entries)), bytes(sorted(lost - _NO_UTF8)))
    if not model.get("byte_fallback") or not {f"<0x{byte:02X}>" for byte in range(256)} <= entries:
        return None
    return TokenBytes(max(len(entry.encode()) for entry in entries), b"")


def _contains(tokenizer: _Part, kind: str) -> bool:
    """Return True if a stage of the tokenizer before the model has a part of this type."""
    stages = [tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")]
    return any(stage is not None and _has(stage, kind) for stage in stages)


def _has(part: _Part, kind: str) -> bool:
    parts = part.get("normalizers", part.get("pretokenizers", ()))
    return part["type"] == kind or any(_has(one, kind) for one in parts)
