"""The file of kept memory: its lock, its owner, its size, and its end."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.kept.header import HEADER_BYTES, MAGIC, kept_bytes
from engine.kept.kept_memory import KeptMemory
from engine.kept.seals import Sealing
from services.cli.main import cli
from services.engine.kept.memory_file import MemoryFile, MemoryInUse, create_memory_file, path_of
from services.runtime.settings import InvalidSetting
from tests.engine.kept.test_kept_memory import IDENTITY

OTHER_PROCESS = """
import os, sys
from pathlib import Path
from services.engine.kept.memory_file import MemoryFile
from tests.engine.kept.test_kept_memory import IDENTITY
from engine.kept.kept_memory import KeptMemory
from engine.kept.seals import Sealing
file = MemoryFile(Path(sys.argv[1]))
if file.difference(IDENTITY) is None:
    file.make(IDENTITY)
memory = KeptMemory.mapped(file.map(IDENTITY), IDENTITY)
memory.kinds[0].device.seal(1, Sealing(bytes(31) + b"k", 0, 0))
memory.kinds[0].cache[1] = 5.0
if "fork" in sys.argv and not os.fork():
    os.close(1)
    sys.stdin.readline()
    os._exit(0)
print("ready", flush=True)
sys.stdin.readline()
"""


def mapped(file: MemoryFile) -> KeptMemory:
    return KeptMemory.mapped(file.map(IDENTITY), IDENTITY)


@contextmanager
def other_process(path: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a process that has the memory, and has sealed block 1."""
    line = [sys.executable, "-c", OTHER_PROCESS, str(path), *arguments]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()
            process.stdin.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "kept"


def test_what_a_killed_process_wrote_is_found(path: Path) -> None:
    with other_process(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        file = MemoryFile(path)
    assert file.difference(IDENTITY) == ""
    memory = mapped(file)
    assert memory.kinds[0].device.sealing(1) == Sealing(bytes(31) + b"k", 0, 0)
    assert float(memory.kinds[0].cache[1].min()) == 5.0
    file.close()


def test_the_memory_of_a_live_process_is_refused(path: Path) -> None:
    with (
        other_process(path),
        pytest.raises(MemoryInUse, match=r"^keep_blocks is '.*', which is used by another process"),
    ):
        MemoryFile(path)


def test_a_forked_child_holds_no_lock(path: Path) -> None:
    with other_process(path, "fork") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()  # its child lives until its input ends
        MemoryFile(path).close()


def test_an_erased_memory_contains_nothing_and_takes_no_room(path: Path) -> None:
    file = MemoryFile(path)
    file.make(IDENTITY)
    mapped(file).kinds[0].device.seal(1, Sealing(b"k" * 32, 0, 0))
    assert path.stat().st_blocks
    file.erase()
    assert (file.difference(IDENTITY), path.stat().st_blocks) == (None, 0)
    file.close()


def test_a_memory_of_another_identity_is_refused_by_its_name(path: Path) -> None:
    file = MemoryFile(path)
    file.make(IDENTITY)
    assert file.difference(replace(IDENTITY, fingerprint="other")) == "fingerprint"
    os.truncate(path, kept_bytes(IDENTITY) // 2)
    assert file.difference(IDENTITY) == "size"
    for header in (b"{}", b"[" * 4000, b""):
        os.pwrite(file._descriptor, (MAGIC + header).ljust(HEADER_BYTES, b"\0"), 0)
        assert file.difference(IDENTITY) == "format"
    file.close()


def test_a_memory_without_room_is_refused(path: Path) -> None:
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
    code += "from services.engine.kept.memory_file import MemoryFile; from pathlib import Path; import sys;"
    code += "from tests.engine.kept.test_kept_memory import IDENTITY; MemoryFile(Path(sys.argv[1])).make(IDENTITY)"
    assert kept_bytes(IDENTITY) > 1 << 20
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert f"InvalidSetting: keep_blocks is {str(path)!r}, which has no room for" in done.stderr


def test_without_room_behind_a_memory_its_blocks_stay(path: Path) -> None:
    with other_process(path) as process:
        process.kill()
        process.wait()
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({kept_bytes(IDENTITY)},) * 2);"
    code += "from services.engine.kept.memory_file import MemoryFile; from pathlib import Path; import sys;"
    code += "from tests.engine.kept.test_kept_memory import IDENTITY;"
    code += "MemoryFile(Path(sys.argv[1])).map_behind(IDENTITY, 1 << 21)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert f"InvalidSetting: keep_blocks is {str(path)!r}, which has no room for" in done.stderr
    file = MemoryFile(path)
    assert file.difference(IDENTITY) == ""
    assert mapped(file).kinds[0].device.sealing(1) == Sealing(bytes(31) + b"k", 0, 0)
    file.close()


def test_what_is_written_behind_a_memory_stays_with_it_and_is_erased_alone_or_with_it(path: Path) -> None:
    file = MemoryFile(path)
    file.make(IDENTITY)
    made = path.stat().st_blocks
    mapped(file).kinds[0].device.seal(1, Sealing(b"k" * 32, 0, 0))
    file.map_behind(IDENTITY, 1 << 21)[:3] = b"row"
    assert path.stat().st_blocks > made
    file.close()
    file = MemoryFile(path)
    assert file.difference(IDENTITY) == ""
    assert bytes(file.map_behind(IDENTITY, 1 << 21)[:4]) == b"row\0"
    file.erase_behind(IDENTITY)
    assert path.stat().st_blocks == made
    assert bytes(file.map_behind(IDENTITY, 1 << 21)[:4]) == bytes(4)
    assert mapped(file).kinds[0].device.sealing(1) == Sealing(b"k" * 32, 0, 0)
    file.erase()
    assert path.stat().st_blocks == 0
    file.close()


def test_a_memory_file_that_is_held_grows_behind_its_memory() -> None:
    descriptor = create_memory_file("engine")
    file = MemoryFile(path_of(descriptor))
    file.make(IDENTITY)
    file.map_behind(IDENTITY, 1 << 21)[:3] = b"row"
    assert os.fstat(descriptor).st_size == kept_bytes(IDENTITY) + (1 << 21)
    file.close()
    os.close(descriptor)


def test_forget_erases_what_an_ended_engine_left_and_nothing_else(path: Path) -> None:
    with other_process(path) as process:
        in_use = CliRunner().invoke(cli, ["forget", str(path)])
        assert (in_use.exit_code, in_use.output) == (1, f"Error: {path} is used by another process\n")
        process.kill()
        process.wait()
    forgotten = CliRunner().invoke(cli, ["forget", str(path)])
    assert (forgotten.exit_code, forgotten.output) == (0, f"{path}: erased\n")
    assert path.stat().st_blocks == 0
    folder = CliRunner().invoke(cli, ["forget", str(path.parent)])
    assert (folder.exit_code, folder.output) == (1, f"Error: {path.parent} has no files of engines (*.blocks)\n")
    for name in ("a", "b"):
        path.with_name(f"{name}.blocks").touch(0o600)
    folder = CliRunner().invoke(cli, ["forget", str(path.parent)])
    assert folder.output == f"{path.with_name('a.blocks')}: erased\n{path.with_name('b.blocks')}: erased\n"
    path.write_bytes(b"notes")
    assert f"{path} has other content" in CliRunner().invoke(cli, ["forget", str(path)]).output


def test_files_that_others_can_read_are_refused(path: Path) -> None:
    path.touch(0o644)
    path.chmod(0o644)
    with pytest.raises(InvalidSetting, match="which can be read by other users: its mode must be 0600"):
        MemoryFile(path)


def test_a_file_with_other_content_is_refused_and_stays(path: Path) -> None:
    path.write_text("notes")
    path.chmod(0o600)
    with pytest.raises(InvalidSetting, match="which has other content: it is left as it is"):
        MemoryFile(path)
    assert path.read_text() == "notes"


def test_a_file_that_begins_with_zeros_is_refused_and_stays(path: Path) -> None:
    content = bytes(32768) + b"an image of a disk"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidSetting, match="which has other content"):
        MemoryFile(path)
    assert path.read_bytes() == content


def test_a_file_that_its_owner_cannot_write_to_is_refused(path: Path) -> None:
    path.touch(0o400)
    with pytest.raises(InvalidSetting, match="its mode must be 0600"):
        MemoryFile(path)


def test_a_refused_file_that_did_not_exist_is_not_left(folder: Path) -> None:
    on_disk = tempfile.TemporaryDirectory(dir=Path(__file__).parent)
    with on_disk as elsewhere:
        with pytest.raises(InvalidSetting, match="which is on a disk"):
            MemoryFile(Path(elsewhere) / "kept")
        assert list(Path(elsewhere).iterdir()) == []


def test_a_link_is_refused(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(InvalidSetting, match="which cannot be opened: Too many levels of symbolic links"):
        MemoryFile(path)
    assert not path.with_name("elsewhere").exists()


def test_a_file_on_a_disk_is_refused() -> None:
    # /tmp may be in memory.
    on_disk = tempfile.TemporaryDirectory(dir=Path(__file__).parent)
    with (
        on_disk as folder,
        pytest.raises(InvalidSetting, match="which is on a disk: give a file in tmpfs or hugetlbfs"),
    ):
        MemoryFile(Path(folder) / "kept")


def test_what_is_no_file_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for name, reason in (("pipe", "which is no regular file"), ("nowhere/kept", "No such file"), ("", "directory")):
        with pytest.raises(InvalidSetting, match=reason):
            MemoryFile(folder / name)


def test_a_memory_file_is_opened_by_the_path_of_the_process_that_holds_it() -> None:
    descriptor = create_memory_file("engine")
    try:
        with other_process(path_of(descriptor)) as process:
            process.send_signal(signal.SIGKILL)
            process.wait()
        file = MemoryFile(path_of(descriptor))
        assert file.difference(IDENTITY) == ""
        with pytest.raises(PermissionError):  # a page that is missing would end an engine with SIGBUS
            os.ftruncate(descriptor, 0)
        file.close()
    finally:
        os.close(descriptor)


def test_no_page_is_in_a_core_dump_or_a_forked_process(path: Path) -> None:
    file = MemoryFile(path)
    file.make(IDENTITY)
    memory = mapped(file)
    address = memory.kinds[0].cache.data_ptr()
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and first.partition("-")[0].isalnum() and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert {"dd", "dc"} <= set(flags.split())
    file.close()
