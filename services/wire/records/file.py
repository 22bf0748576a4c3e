"""Writes files of records, as `records.proto` describes them, on a thread of its own: nobody waits for the disk.

A record is a help, not a duty: where it cannot go on, that is said in one line of the log, and the service goes on.
"""

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

# Entries that may wait for the disk.
_MOST_WAITING = 1024
# What is kept of the size for the last entry.
_LAST_ENTRY_BYTES = 512
_MOST_NAMES = 1000
# Making a long entry takes the interpreter away from other threads; between two of them they have their turn.
_LONG_ENTRY_BYTES = 4096
_PAUSE_SECONDS = 0.0005

# Makes entries; None stands for a pause in long work.
Entries = Callable[[], Iterable[pb.RecordEntry | None]]

log = logging.getLogger("quire.record")


def now() -> str:
    """Return the time for a header: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def create(path: Path) -> tuple[BinaryIO, Path]:
    """Create a file that only its owner may read; return it and its path. Raises OSError.

    No file is overwritten: where there is one, the new one is called the same with `.2`, `.3` and so on behind.
    """
    candidates = [path, *(path.with_name(f"{path.name}.{number}") for number in range(2, _MOST_NAMES))]
    for candidate in candidates:
        try:
            descriptor = os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        return os.fdopen(descriptor, "wb"), candidate
    raise FileExistsError(f"{path} exists, and {_MOST_NAMES} others of its name")


def length_delimited(entry: pb.RecordEntry) -> bytes:
    """Return an entry's bytes behind their length."""
    data = entry.SerializeToString()
    length, size = bytearray(), len(data)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*length, size)) + data


class RecordFile:
    """A file that is written. `write` may be called from any one thread, and never waits for the disk."""

    def __init__(
        self, file: BinaryIO, name: str, *, most_bytes: int | None = None, most_waiting: int = _MOST_WAITING
    ) -> None:
        """Take over an open file, called `name` in the log.

        Recording stops when the file would grow above `most_bytes`, or when more than `most_waiting` entries wait.
        """
        self._file = file
        self._name = name
        self._bytes_left = None if most_bytes is None else most_bytes - _LAST_ENTRY_BYTES
        self._most_waiting = most_waiting
        self._entries: queue.SimpleQueue[Entries | None] = queue.SimpleQueue()
        self._why = ""  # written before the end is put into the queue, read after it was taken out
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether nothing more is recorded."""
        return self._stopped

    @property
    def closed(self) -> bool:
        """Whether all is on the disk, or given up."""
        return not self._thread.is_alive()

    def write(self, entries: Entries) -> None:
        """Have entries made and written by the file's thread. Does nothing once recording has stopped."""
        if self._stopped:
            return
        if self._entries.qsize() >= self._most_waiting:
            self._stop(f"the disk does not keep up: {self._most_waiting} entries wait for it")
            log.warning("%s: recording stops: %s", self._name, self._why)
            return
        self._entries.put(entries)

    def finish(self, reason: str) -> None:
        """Write what waits, then the end. Does not wait for it."""
        if not self._stopped:
            self._stop(reason)

    def join(self, seconds: float) -> None:
        """Wait until the file is closed, so long at most."""
        self._thread.join(seconds)

    def _stop(self, reason: str) -> None:
        self._why, self._stopped = reason, True
        self._entries.put(None)

    # On the file's own thread.

    def _run(self) -> None:
        try:
            with self._file:
                full = self._write_entries()
                reason = f"the file is full: it may have {full} bytes" if full else self._why
                if full:
                    log.warning("%s: recording stops: %s", self._name, reason)
                self._file.write(length_delimited(pb.RecordEntry(end=pb.RecordEnd(reason=reason))))
        except Exception as error:
            log.warning("%s: recording stops: %s: %s", self._name, type(error).__name__, error)
        finally:
            self._stopped = True
            self._forget()

    def _write_entries(self) -> int:
        """Write entries until the end comes; return the bytes that the file may have when it is full, else 0."""
        written = 0
        while (make := self._entries.get()) is not None:
            for entry in make():
                data = b"" if entry is None else length_delimited(entry)
                written += len(data)
                if self._bytes_left is not None and written > self._bytes_left:
                    self._stopped = True
                    return self._bytes_left + _LAST_ENTRY_BYTES
                self._file.write(data)
                if entry is None or len(data) > _LONG_ENTRY_BYTES:
                    time.sleep(_PAUSE_SECONDS)
            if self._entries.empty():
                self._file.flush()
        return 0

    def _forget(self) -> None:
        """Let go of what waits: nobody will write it."""
        while not self._entries.empty():
            self._entries.get()
