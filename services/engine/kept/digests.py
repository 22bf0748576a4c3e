"""Digests of what K and V depend on: every byte of the weights, and the code that computes with them."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

import engine

_WEIGHTS = ("*.safetensors", "*.gguf")
_SOURCES = ("*.py", "*.cpp", "*.h")
_CODE = Path(str(engine.__file__)).parent


class FileDigests:
    """SHA-256 of files, which are read once as long as device, inode, size and time of change stay the same."""

    def __init__(self, folder: Path) -> None:
        """Keep them in a folder, which is made at the first one."""
        self._folder = folder

    def of(self, path: Path) -> str:
        """Return the digest of a file's bytes. Raises OSError."""
        path = path.resolve()
        facts = path.stat()
        known = [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns]
        record = self._folder / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
        with suppress(OSError, ValueError, KeyError):
            read = json.loads(record.read_text())
            if read["file"] == known:
                return str(read["sha256"])
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with suppress(OSError):  # a folder that cannot be written to costs the time again
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = record.with_suffix(".partial")
            partial.write_text(json.dumps({"file": known, "sha256": digest}))
            partial.rename(record)
        return digest


def model_digest(folder: Path, digests: FileDigests) -> str:
    """Return a digest of a model's configuration and of every byte of its weights. Raises OSError."""
    files = [folder / "config.json", *sorted(path for kind in _WEIGHTS for path in folder.glob(kind))]
    return _joined(f"{path.name}:{digests.of(path)}" for path in files)


@cache
def code_digest() -> str:
    """Return a digest of the engine's sources, and of the libraries that compute with them."""
    sources = sorted(path for kind in _SOURCES for path in _CODE.rglob(kind))
    texts = (hashlib.sha256(path.read_bytes()).hexdigest() for path in sources)
    return _joined([torch.__version__, version("transformers"), *texts])


def _joined(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
