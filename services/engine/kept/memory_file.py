"""The file in which kept memory lies: opened, locked, sized, mapped and erased.

It is a file of tmpfs or hugetlbfs, or a memory file (memfd) that the supervising process holds. The lock is that of an
open file description: the kernel drops it when the process has ended, in whatever way, also across containers. It is
never inferred from time.
"""

import ctypes
import fcntl
import os
import stat
import struct
import time
from contextlib import suppress
from mmap import MADV_DONTDUMP, MADV_DONTFORK, MADV_HUGEPAGE, MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from pathlib import Path

from engine.kept.header import HEADER_BYTES, MAGIC, KeptIdentity, header_of, is_header, kept_bytes, read_header
from services.runtime.settings import InvalidSetting

SUFFIX = ".blocks"
"""End of the name of each engine's file in a folder of several."""

_PRIVATE = 0o600
_OTHERS = 0o077
# fallocate(2): frees the pages of a range and keeps the size, which a seal against truncation allows.
_PUNCH_HOLE = 0x02 | 0x01
# struct flock: type, whence, start, length, pid.
_FLOCK = "hhqqi4x"
_LOCK_RETRY_SECONDS = 0.05
# Types of file systems, of statfs(2): elsewhere K and V would be written to a disk.
_TMPFS, _HUGETLBFS = 0x01021994, 0x958458F6
_STATFS_BYTES = 256


class MemoryInUse(InvalidSetting):
    """Another process, which lives, has the memory."""


class MemoryFile:
    """One process's opening of a kept memory, from its lock to its end."""

    def __init__(self, path: Path, wait_seconds: float = 0.0) -> None:
        """Open and lock a file, which is created if it does not exist.

        Waits so long for a process that has been killed and has not ended. Raises MemoryInUse, and InvalidSetting for a
        file of somebody else, one that others can read, one with other content, one on a disk, or none.
        """
        self.path = path
        self._descriptor, created = _opened(path)
        self._map: mmap | None = None
        try:
            _check_private(path, os.fstat(self._descriptor))
            _check_in_memory(path, self._descriptor)
            self._lock(wait_seconds)
            self._check_content()
        except BaseException:
            os.close(self._descriptor)
            if created:
                path.unlink(missing_ok=True)
            raise
        # A forked child would share the lock, and hold it after this process.
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._close_in_child)

    def difference(self, identity: KeptIdentity) -> str | None:
        """Return in what the memory differs from an identity: empty if it has it, None if it contains nothing."""
        page = os.pread(self._descriptor, HEADER_BYTES, 0)
        if not is_header(page):
            return None
        found = read_header(page)
        if found is None:
            return "format"
        if different := identity.difference(found):
            return different
        return "" if os.fstat(self._descriptor).st_size >= kept_bytes(identity) else "size"

    def make(self, identity: KeptIdentity) -> None:
        """Erase the file, and give it size and header of an empty memory. Raises InvalidSetting without room."""
        self.erase()
        size = kept_bytes(identity)
        try:
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            with self._mapped(size) as made:  # a start that ends here leaves a memory of no format, not another content
                made[: len(MAGIC)] = MAGIC
            os.posix_fallocate(self._descriptor, 0, size)  # now, because a page that is missing later ends the process
        except OSError as error:
            self.erase()
            fault = f"has no room for {size} bytes: {error.strerror or error}"
            raise InvalidSetting(f"keep_blocks is {str(self.path)!r}, which {fault}") from error
        with suppress(OSError):  # only a memory file has seals
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with self._mapped(size) as made:  # hugetlbfs has no write(2)
            made[:HEADER_BYTES] = header_of(identity)

    def map(self, identity: KeptIdentity) -> memoryview:
        """Map the memory of this identity, which the file must have, for as long as it is not closed."""
        self._map = self._mapped(kept_bytes(identity))
        self._map.madvise(MADV_DONTFORK)
        self._map.madvise(MADV_DONTDUMP)
        with suppress(OSError, ValueError):  # kernels without large pages for shared memory
            self._map.madvise(MADV_HUGEPAGE)
        return memoryview(self._map)

    def map_behind(self, identity: KeptIdentity, size: int) -> memoryview:
        """Map `size` bytes behind the memory of this identity, zeros unless an earlier process wrote there.

        They are erased with the rest. Raises InvalidSetting without room.
        """
        start = kept_bytes(identity)
        try:
            os.posix_fallocate(self._descriptor, start, size)
        except OSError as error:
            self.erase_behind(identity)
            fault = f"has no room for {start + size} bytes: {error.strerror or error}"
            raise InvalidSetting(f"keep_blocks is {str(self.path)!r}, which {fault}") from error
        mapped = self._mapped(size, start)
        mapped.madvise(MADV_DONTFORK)
        mapped.madvise(MADV_DONTDUMP)
        return memoryview(mapped)

    def erase_behind(self, identity: KeptIdentity) -> None:
        """Free all pages behind the memory of this identity."""
        start, end = kept_bytes(identity), os.fstat(self._descriptor).st_size
        if start < end:
            _punch(self._descriptor, start, end - start)

    def _mapped(self, size: int, start: int = 0) -> mmap:
        # A map keeps a copy of its descriptor, which a forked child would have too: with the lock, if it were this one.
        own = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap(own, size, MAP_SHARED, PROT_READ | PROT_WRITE, offset=start)
        finally:
            os.close(own)

    def erase(self) -> None:
        """Free all pages: the memory contains nothing any more, and its size stays."""
        size = os.fstat(self._descriptor).st_size
        if size:
            _punch(self._descriptor, 0, size)

    def close(self) -> None:
        """Give up lock and file; a mapping stays until nothing refers to it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self, wait_seconds: float) -> None:
        until = time.monotonic() + wait_seconds
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        while True:
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
                return
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= until:
                    raise MemoryInUse(f"keep_blocks is {str(self.path)!r}, which is used by another process") from None
                time.sleep(_LOCK_RETRY_SECONDS)

    def _check_content(self) -> None:
        """Raise InvalidSetting for a file that is neither kept memory nor empty: it would be erased."""
        page = os.pread(self._descriptor, HEADER_BYTES, 0)
        if os.fstat(self._descriptor).st_blocks and not is_header(page):
            raise InvalidSetting(f"keep_blocks is {str(self.path)!r}, which has other content: it is left as it is")

    def _close_in_child(self) -> None:
        if self._descriptor >= 0 and os.getpid() != self._pid:
            os.close(self._descriptor)
            self._descriptor = -1


def create_memory_file(name: str) -> int:
    """Return the descriptor of an empty memory file, which exists while a process has a descriptor of it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, _PRIVATE)
    return descriptor


def path_of(descriptor: int) -> Path:
    """Return a path by which other processes of the same user can open the file of a descriptor of this process."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def _opened(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and whether the file was created. Raises InvalidSetting."""
    # Others can make links in a folder such as /dev/shm; the links of /proc are the kernel's.
    links = 0 if path.is_relative_to("/proc") else os.O_NOFOLLOW
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | links
    try:
        with suppress(FileNotFoundError):
            return os.open(path, flags), False
        return os.open(path, flags | os.O_CREAT, _PRIVATE), True
    except OSError as error:
        fault = error.strerror or str(error)
        raise InvalidSetting(f"keep_blocks is {str(path)!r}, which cannot be opened: {fault}") from error


def _check_private(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidSetting(f"keep_blocks is {str(path)!r}, which is no regular file")
    if facts.st_mode & _PRIVATE != _PRIVATE:
        raise InvalidSetting(f"keep_blocks is {str(path)!r}, which its owner cannot write to: its mode must be 0600")
    if facts.st_mode & _OTHERS:
        raise InvalidSetting(f"keep_blocks is {str(path)!r}, which can be read by other users: its mode must be 0600")
    if facts.st_uid != os.geteuid():
        raise InvalidSetting(f"keep_blocks is {str(path)!r}, which belongs to user {facts.st_uid}")


def _check_in_memory(path: Path, descriptor: int) -> None:
    facts = ctypes.create_string_buffer(_STATFS_BYTES)
    known = not ctypes.CDLL(None).fstatfs(descriptor, facts)
    if known and ctypes.c_long.from_buffer(facts).value not in (_TMPFS, _HUGETLBFS):
        raise InvalidSetting(f"keep_blocks is {str(path)!r}, which is on a disk: give a file in tmpfs or hugetlbfs")


def _punch(descriptor: int, start: int, size: int) -> None:
    """Free pages of a file. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)):
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault))
