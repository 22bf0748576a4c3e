"""The files of a model's tokenizer as smg asks for them: a zip archive in pieces, with the SHA-256 of all."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from services.engine.startup.tokenizer_files import TokenizerFiles

_PIECE_BYTES = 64 * 1024  # as the pieces of smg's own servicers
_GENERATION = "generation_config.json"


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
