"""The files of a model's tokenizer, as gateways get them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from quire.v1 import engine_pb2

# What transformers' tokenizers read of a model's folder. The configuration tells the older ones which they are.
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"),
)
_PIECE_BYTES = 1024 * 1024


class TokenizerFiles:
    """Those files of a model folder; an empty one is as good as none."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / name for name in sorted(_NAMES) if (folder / name).is_file()]

    def digest(self) -> bytes:
        """Return the SHA-256 over their names, a zero byte and the SHA-256 of the content behind each, in order."""
        digest = hashlib.sha256()
        for path in self._paths:
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.digest()

    def pieces(self) -> Iterator[engine_pb2.GetTokenizerResponse]:
        """Yield them in messages of 1 MiB at most, read while they are asked for."""
        for path in self._paths:
            yield engine_pb2.GetTokenizerResponse(file=path.name)  # an empty one is there as well
            with path.open("rb") as file:
                while content := file.read(_PIECE_BYTES):
                    yield engine_pb2.GetTokenizerResponse(file=path.name, content=content)
