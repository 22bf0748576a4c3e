"""The model's tokenizer in the engine's process, for texts and stop strings, and its files as smg asks for them.

smg asks for a zip archive in pieces, with the SHA-256 of all.
"""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from smg_grpc_proto.generated import common_pb2

from services.engine.startup.tokenizer_files import TokenizerFiles
from services.models.files.tokenizer_loading import InvalidTokenizer, load_tokenizer
from services.runtime.errors import InvalidField, UnsupportedField

# Tokenizing takes about a second for each.
_MOST_CHARACTERS = 1 << 20
_PIECE_BYTES = 64 * 1024  # as the pieces of smg's own servicers
_GENERATION = "generation_config.json"


class EngineTokenizer:
    """Loads the tokenizer when it is first needed: smg sends token ids, and needs it only for stop strings."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the model's."""
        self._folder = folder
        self._loading = asyncio.Lock()
        self._backend: tokenizers.Tokenizer | None = None

    async def backend(self, field: str) -> tokenizers.Tokenizer:
        """Return the tokenizer, which `field` needs. Raises UnsupportedField if the model has none."""
        async with self._loading:
            if self._backend is None:
                try:
                    self._backend = (await asyncio.to_thread(load_tokenizer, self._folder)).backend
                except InvalidTokenizer as error:
                    raise UnsupportedField(f"{field} requires the model's tokenizer: {error}", field) from error
        return self._backend

    async def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special ones that the tokenizer adds. Raises InvalidField."""
        if len(text) > _MOST_CHARACTERS:
            raise InvalidField(f"text must have at most {_MOST_CHARACTERS} characters, not {len(text)}", "text")
        backend = await self.backend("text")
        async with self._loading:  # one text at a time
            return (await asyncio.to_thread(backend.encode, text)).ids


def archive_pieces(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield an archive; the last piece has the digest."""
    digest = hashlib.sha256(archive).hexdigest()
    last = max(0, len(archive) - 1) // _PIECE_BYTES
    for number in range(last + 1):
        part = archive[number * _PIECE_BYTES : (number + 1) * _PIECE_BYTES]
        yield common_pb2.GetTokenizerChunk(data=part, sha256=digest if number == last else "")


def tokenizer_archive(folder: Path) -> bytes:
    """Return the archive, which is the same for the same files. It takes seconds for large vocabularies."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _files(folder):
            # Without a time; the default of ZipInfo is 1980.
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    contents: dict[str, bytearray] = {}
    for piece in TokenizerFiles(folder).pieces():
        contents.setdefault(piece.file, bytearray()).extend(piece.content)
    if (path := folder / _GENERATION).is_file():
        contents[_GENERATION] = bytearray(path.read_bytes())
    for name, content in sorted(contents.items()):
        yield name, bytes(content)
