"""The files of a model's tokenizer, for gateways."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ModelUnsupported
from quire.v1 import engine_pb2
from services.engine.guided.text_tokenizer import read_tokenizer
from services.models.tokenizer_settings import tokenizer_settings

# Files of a model's folder that transformers' tokenizers read. Older tokenizers need config.json for their class.
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"),
)
_PIECE_BYTES = 1024 * 1024


class TokenizerFiles:
    """The tokenizer files in a model's folder."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / name for name in sorted(_NAMES) if (folder / name).is_file()]

    def digest(self) -> bytes:
        """Return the SHA-256 over name, zero byte and SHA-256 of the content of each file, in order of the names."""
        digest = hashlib.sha256()
        for path in self._paths:
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.digest()

    def pieces(self) -> Iterator[engine_pb2.GetTokenizerResponse]:
        """Yield the files in messages of at most 1 MiB, read lazily."""
        for path in self._paths:
            yield engine_pb2.GetTokenizerResponse(file=path.name)  # so that empty files arrive too
            with path.open("rb") as file:
                while content := file.read(_PIECE_BYTES):
                    yield engine_pb2.GetTokenizerResponse(file=path.name, content=content)


def check_tokenizer(folder: Path) -> None:
    """Read a model's tokenizer. Raises ModelUnsupported: gateways could not read it either, and would wait for ever."""
    try:
        read_tokenizer(folder)
        tokenizer_settings(folder)
    except Exception as error:  # `tokenizers` raises nothing more precise
        reason = str(error).strip().partition("\n")[0]
        raise ModelUnsupported(f"{folder.name}: its tokenizer cannot be read: {reason}") from error
