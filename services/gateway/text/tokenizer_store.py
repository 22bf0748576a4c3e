"""The tokenizers of the models that engines serve, as the engines give them."""

import asyncio
import hashlib
import re
import tempfile
from collections.abc import AsyncIterable, Container
from pathlib import Path

from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc as pb_grpc
from services.gateway.text.tokenizer import Tokenizer, TokenizerLoadError
from services.runtime.errors import Unavailable

_FETCH_SECONDS = 60.0
_MOST_BYTES = 256 * 1024 * 1024
_FILE_NAME = re.compile(r"\w[\w.-]*")


class TokenizerStore:
    """Tokenizers by the digest of their files, each fetched once while it is kept."""

    def __init__(self) -> None:
        self._loading: dict[bytes, asyncio.Task[Tokenizer]] = {}

    async def tokenizer(self, digest: bytes, stub: "pb_grpc.EngineAsyncStub") -> Tokenizer:
        """Return the tokenizer of this digest, which the engine has. Raises Unavailable when it cannot be had."""
        if (task := self._loading.get(digest)) is None or (task.done() and task.exception() is not None):
            task = self._loading[digest] = asyncio.create_task(_fetched(digest, stub))
        return await asyncio.shield(task)

    def keep(self, digests: Container[bytes]) -> None:
        """Forget the tokenizers of other digests; one that is being fetched is for an engine to come."""
        self._loading = {key: task for key, task in self._loading.items() if key in digests or not task.done()}


async def _fetched(digest: bytes, stub: "pb_grpc.EngineAsyncStub") -> Tokenizer:
    pieces = stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=_FETCH_SECONDS)
    with tempfile.TemporaryDirectory(prefix="quire-tokenizer-") as folder:
        await _write(pieces, Path(folder))
        try:
            return await asyncio.to_thread(_load, digest, Path(folder))
        except TokenizerLoadError as error:
            raise Unavailable(f"its tokenizer cannot be read: {error}") from error


async def _write(pieces: AsyncIterable[pb.GetTokenizerResponse], folder: Path) -> None:
    written = 0
    async for piece in pieces:
        written += len(piece.content)
        if not _FILE_NAME.fullmatch(piece.file) or written > _MOST_BYTES:
            raise Unavailable("its tokenizer has a file that is too large, or outside its folder")
        with (folder / piece.file).open("ab") as file:
            file.write(piece.content)


def _load(digest: bytes, folder: Path) -> Tokenizer:
    if _digest(folder) != digest:
        raise TokenizerLoadError("its files came incomplete")
    return Tokenizer.load(folder)


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()
