"""The files of a model's tokenizer, for gateways."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ModelUnsupported
from quire.v1 import engine_pb2
from services.models.files.chat_templates import additional_files, transfer_name
from services.models.files.template_language import InvalidTemplate
from services.models.files.tokenizer_loading import InvalidTokenizer, load_tokenizer

# Files of a model's folder that transformers' tokenizers read. Older tokenizers need config.json for their class.
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"),
    *("chat_template.jinja", "chat_template.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"),
)
_PIECE_BYTES = 1024 * 1024


def check_tokenizer(folder: Path) -> None:
    """Raise ModelUnsupported if gateways could not use the folder's tokenizer or chat templates."""
    try:
        load_tokenizer(folder).templates.check()
    except (InvalidTokenizer, InvalidTemplate) as error:
        raise ModelUnsupported(f"{folder.name}: {error}") from error


class TokenizerFiles:
    """The tokenizer files in a model's folder, by the names under which gateways receive them."""

    def __init__(self, folder: Path) -> None:
        """Find the files. Raises InvalidTemplate for too many of chat templates."""
        files = {name: path for name in _NAMES if (path := folder / name).is_file()}
        files |= {transfer_name(path): path for path in additional_files(folder)}
        self._files = dict(sorted(files.items()))

    def digest(self) -> bytes:
        """Return the SHA-256 over name, zero byte and SHA-256 of the content of each file, in order of the names."""
        digest = hashlib.sha256()
        for name, path in self._files.items():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.digest()

    def pieces(self) -> Iterator[engine_pb2.GetTokenizerResponse]:
        """Yield the files in messages of at most 1 MiB, read lazily."""
        for name, path in self._files.items():
            yield engine_pb2.GetTokenizerResponse(file=name)  # so that empty files arrive too
            with path.open("rb") as file:
                while content := file.read(_PIECE_BYTES):
                    yield engine_pb2.GetTokenizerResponse(file=name, content=content)
