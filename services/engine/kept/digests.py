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
from engine.errors import ModelUnsupported
from engine.native.formats.safetensors_files import INDEX

_CONFIG = "config.json"
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
        known = _facts(path)
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


class ModelFiles:
    """A model's configuration, index and weights, digested before they are loaded: what is loaded must be the same."""

    def __init__(self, folder: Path, digests: FileDigests) -> None:
        """Read every byte. Raises OSError."""
        named = [path for name in (_CONFIG, INDEX) if (path := folder / name).is_file()]
        self._files = [*named, *sorted(path for kind in _WEIGHTS for path in folder.glob(kind))]
        self._facts = self._now()
        self.digest = _joined(f"{path.name}:{digests.of(path)}" for path in self._files)

    def check_unchanged(self) -> None:
        """Raise ModelUnsupported if a file has changed since."""
        if self._now() != self._facts:
            raise ModelUnsupported("files of the model were changed while it was loaded: start the engine again")

    def _now(self) -> list[list[int]]:
        return [_facts(path) for path in self._files if path.is_file()]


def _facts(path: Path) -> list[int]:
    """Return what changes with a file's content. No program can set the time of its inode's change (st_ctime)."""
    facts = path.stat()
    return [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]


@cache
def code_digest() -> str:
    """Return a digest of the engine's sources, and of the libraries that compute with them."""
    sources = sorted(path for kind in _SOURCES for path in _CODE.rglob(kind))
    texts = (hashlib.sha256(path.read_bytes()).hexdigest() for path in sources)
    return _joined([torch.__version__, version("transformers"), *texts])


def _joined(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
