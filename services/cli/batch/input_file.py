"""The file of requests: read twice, so a pipe is copied to a temporary file first."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from services.cli.batch.plan import InvalidBatch

_STANDARD_INPUT = Path("-")
_CHUNK_BYTES = 1 << 20
# Of a pipe, which is copied. A device may never end.
_MOST_BYTES = 4 << 30


class InputFile(NamedTuple):
    """A file that can be read repeatedly, and its name for people."""

    path: Path
    name: str


@contextmanager
def input_file(given: Path) -> Iterator[InputFile]:
    """Make a file, a pipe or `-` for standard input readable. Raises InvalidBatch."""
    if given != _STANDARD_INPUT and given.is_file():
        yield InputFile(given, str(given))
        return
    name = "standard input" if given == _STANDARD_INPUT else str(given)
    with tempfile.NamedTemporaryFile(prefix="quire-run-batch-") as copy:
        try:
            with nullcontext(sys.stdin.buffer) if given == _STANDARD_INPUT else given.open("rb") as source:
                _copy(source, copy, name)
            copy.flush()
        except OSError as error:
            raise InvalidBatch(f"{name} cannot be copied to {copy.name}: {error.strerror}") from error
        yield InputFile(Path(copy.name), name)


def _copy(source: BinaryIO, copy: IO[bytes], name: str) -> None:
    left = _MOST_BYTES
    while chunk := source.read(_CHUNK_BYTES):
        if (left := left - len(chunk)) < 0:
            raise InvalidBatch(f"{name} has more than {_MOST_BYTES} bytes, so it must be a file, not a pipe")
        copy.write(chunk)
