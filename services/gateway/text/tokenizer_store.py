"""Fetches and caches the tokenizers of the engines' models."""

import asyncio
import hashlib
import re
import tempfile
from collections.abc import AsyncIterable, Container
from pathlib import Path

from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc as pb_grpc
from services.gateway.dialects.selection import UNSELECTED, DialectSelection
from services.gateway.text.tokenizer import Tokenizer, TokenizerLoadError
from services.models.files.chat_templates import restore_folders
from services.runtime.errors import Unavailable

_FETCH_SECONDS = 60.0
_MAX_BYTES = 256 * 1024 * 1024
_FILE_NAME = re.compile(r"\w[\w.-]*")


class TokenizerStore:
    """Tokenizers by the digest of their files, each fetched once until it is pruned."""

    def __init__(self, selection: DialectSelection = UNSELECTED) -> None:
        self._selection = selection
        self._loading: dict[bytes, asyncio.Task[Tokenizer]] = {}

    async def tokenizer(self, digest: bytes, stub: "pb_grpc.EngineAsyncStub") -> Tokenizer:
        """Return the tokenizer with this digest, fetched from the engine if needed. Raises Unavailable."""
        if (task := self._loading.get(digest)) is None or (task.done() and task.exception() is not None):
            task = self._loading[digest] = asyncio.create_task(_fetch(digest, stub, self._selection))
        return await asyncio.shield(task)

    def prune(self, in_use: Container[bytes]) -> None:
        """Drop the tokenizers whose digest is not in use. A running fetch is kept, because an engine is joining."""
        self._loading = {key: task for key, task in self._loading.items() if key in in_use or not task.done()}


async def _fetch(digest: bytes, stub: "pb_grpc.EngineAsyncStub", selection: DialectSelection) -> Tokenizer:
    pieces = stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=_FETCH_SECONDS)
    with tempfile.TemporaryDirectory(prefix="quire-tokenizer-") as folder:
        await _write(pieces, Path(folder))
        try:
            return await asyncio.to_thread(_load, digest, Path(folder), selection)
        except TokenizerLoadError as error:
            raise Unavailable(f"the engine's tokenizer cannot be read: {error}") from error


async def _write(pieces: AsyncIterable[pb.GetTokenizerResponse], folder: Path) -> None:
    written = 0
    async for piece in pieces:
        written += len(piece.content)
        if not _FILE_NAME.fullmatch(piece.file):
            raise Unavailable(f"the engine's tokenizer has a file with an invalid name: {piece.file[:100]!r}")
        if written > _MAX_BYTES:
            raise Unavailable(f"the engine's tokenizer must have at most {_MAX_BYTES} bytes")
        with (folder / piece.file).open("ab") as file:
            file.write(piece.content)


def _load(digest: bytes, folder: Path, selection: DialectSelection) -> Tokenizer:
    if _digest(folder) != digest:
        raise TokenizerLoadError("the digest of its files does not match")
    restore_folders(folder)
    return Tokenizer.load(folder, selection)


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()
