"""Writes record files, as described in `records.proto`, on their own thread, so that no caller waits for the disk.

Records are optional: if recording fails, the log has one line, and the service continues.
"""

import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from quire.v1 import records_pb2 as pb
from services.wire.records.digest import FIELD_BYTES, RunningDigest

# Maximum entries queued for the disk.
_MAX_QUEUED = 1024
# Bytes reserved for the last entry.
_LAST_ENTRY_BYTES = 512
_MAX_NAMES = 1000
# Beside an entry: its length and its digest.
_MAX_FRAME_BYTES = 5 + FIELD_BYTES
# Serializing a long entry holds the interpreter's lock, so the thread pauses after it.
_LONG_ENTRY_BYTES = 4096
_PAUSE_SECONDS = 0.0005

# Makes entries; None is a pause in long work.
Entries = Callable[[], Iterable[pb.RecordEntry | None]]

log = logging.getLogger("quire.record")


def now() -> str:
    """Return the time for a header: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def create(path: Path) -> tuple[BinaryIO, Path]:
    """Create a file that only its owner may read; return it and its path. Raises OSError.

    Existing files are not overwritten: the name gets the suffix `.2`, `.3` and so on.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file", str(path))
    candidates = [path, *(path.with_name(f"{path.name}.{number}") for number in range(2, _MAX_NAMES))]
    for candidate in candidates:
        try:
            descriptor = os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        return os.fdopen(descriptor, "wb"), candidate
    raise FileExistsError(f"{path} exists, as do {_MAX_NAMES} files with its name and a number")


class EntryEncoder:
    """Makes the bytes of a file's entries in order, each with the digest of all up to it."""

    def __init__(self) -> None:
        self._digest = RunningDigest()

    def encode(self, entry: pb.RecordEntry) -> bytes:
        """Return an entry's bytes with their digest, preceded by their length."""
        data = entry.SerializeToString()
        return length_delimited(data + self._digest.field_after(data))


def length_delimited(data: bytes) -> bytes:
    """Return an entry's bytes, preceded by their length."""
    length, size = bytearray(), len(data)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*length, size)) + data


class RecordFile:
    """A record file. One thread may call `write`, which never waits for the disk."""

    def __init__(
        self, file: BinaryIO, name: str, *, max_bytes: int | None = None, max_queued: int = _MAX_QUEUED
    ) -> None:
        """Take over an open file, called `name` in the log.

        Recording stops before the file exceeds `max_bytes`, and when more than `max_queued` entries are queued.
        """
        self._file = file
        self._name = name
        self._encoder = EntryEncoder()
        self._bytes_left = None if max_bytes is None else max_bytes - _LAST_ENTRY_BYTES
        self._max_queued = max_queued
        self._entries: queue.SimpleQueue[Entries | None] = queue.SimpleQueue()
        self._reason = ""  # written before the end is queued, read after it is dequeued
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Return True if recording has stopped."""
        return self._stopped

    @property
    def closed(self) -> bool:
        """Return True if the file is closed."""
        return not self._thread.is_alive()

    def write(self, entries: Entries) -> None:
        """Queue entries for the file's thread, which makes and writes them. Does nothing once recording has stopped."""
        if self._stopped:
            return
        if self._entries.qsize() >= self._max_queued:
            self._stop(f"the disk is too slow: {self._max_queued} entries are queued")
            log.warning("%s: recording stops: %s", self._name, self._reason)
            return
        self._entries.put(entries)

    def finish(self, reason: str) -> None:
        """Write the queued entries, then the end. Does not wait."""
        if not self._stopped:
            self._stop(reason)

    def join(self, seconds: float) -> None:
        """Wait until the file is closed, at most this long."""
        self._thread.join(seconds)

    def _stop(self, reason: str) -> None:
        self._reason, self._stopped = reason, True
        self._entries.put(None)

    # On the file's own thread.

    def _run(self) -> None:
        try:
            with self._file:
                full = self._write_entries()
                reason = f"the file is full: its limit is {full} bytes" if full else self._reason
                if full:
                    log.warning("%s: recording stops: %s", self._name, reason)
                self._file.write(self._encoder.encode(pb.RecordEntry(end=pb.RecordEnd(reason=reason))))
        except Exception as error:
            log.warning("%s: recording stops: %s: %s", self._name, type(error).__name__, error)
        finally:
            self._stopped = True
            self._drop_queued()

    def _write_entries(self) -> int:
        """Write entries until the end; return the file's limit if it is full, otherwise 0."""
        written = 0
        while (make := self._entries.get()) is not None:
            for entry in make():
                written += 0 if entry is None else _MAX_FRAME_BYTES + entry.ByteSize()
                if self._bytes_left is not None and written > self._bytes_left:
                    self._stopped = True
                    return self._bytes_left + _LAST_ENTRY_BYTES
                data = b"" if entry is None else self._encoder.encode(entry)
                self._file.write(data)
                if entry is None or len(data) > _LONG_ENTRY_BYTES:
                    time.sleep(_PAUSE_SECONDS)
            if self._entries.empty():
                self._file.flush()
        return 0

    def _drop_queued(self) -> None:
        """Drop the queued entries."""
        while not self._entries.empty():
            self._entries.get()
