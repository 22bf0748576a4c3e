"""The map of a SentencePiece normalizer: a trie of texts, and what each becomes.

It is the number of bytes of the trie, the trie, and replacements that end with a zero byte. A unit of the trie has 32
bits: where its children are, the byte that leads to it, and whether a text ends there; then one of its children is the
place of the replacement. See https://github.com/s-yata/darts-clone and sentencepiece's src/normalizer.cc. The library
`tokenizers` reads the map without checking it, and a place beyond its end would stop the process that encodes a text.
"""

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from services.models.gguf.metadata import CHARSMAP

_SIZE_BYTES, _UNIT_BYTES, _MOST_BYTES = 4, 4, 1 << 24
_IS_PLACE = 1 << 31


def checked_charsmap(charsmap: bytes) -> bytes:
    """Return a map whose places are all within it. Raises ModelUnsupported, with the key, for any other one."""
    if not (_SIZE_BYTES < len(charsmap) <= _MOST_BYTES and _is_sound(charsmap)):
        raise ModelUnsupported(f"its {CHARSMAP} is damaged: a place in it is beyond its end")
    return charsmap


def _is_sound(charsmap: bytes) -> bool:
    size = int.from_bytes(charsmap[:_SIZE_BYTES], "little")
    texts = charsmap[_SIZE_BYTES + size :]
    if size % _UNIT_BYTES or not _UNIT_BYTES <= size < len(charsmap) - _SIZE_BYTES or not texts.endswith(b"\0"):
        return False
    units = np.frombuffer(charsmap, "<u4", size // _UNIT_BYTES, offset=_SIZE_BYTES).astype(np.int64)
    nodes = np.flatnonzero((units & _IS_PLACE) == 0)
    children = nodes ^ _offsets(units[nodes])
    if ((children | 0xFF) >= len(units)).any():  # any byte may follow
        return False
    ends = (units[nodes] >> 8) & 1 == 1
    return _are_texts(units[children[ends]] & ~_IS_PLACE, texts)


def _offsets(units: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    shifted: npt.NDArray[np.int64] = (units >> 10) << ((units & (1 << 9)) >> 6)
    return shifted


def _are_texts(places: npt.NDArray[np.int64], texts: bytes) -> bool:
    """Return whether these are places of characters in a text."""
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    if (places >= len(texts)).any():
        return False
    continued = (np.frombuffer(texts, np.uint8) & 0xC0) == 0x80
    return not continued[places].any()
