"""Records as files: contents, permissions, and failures of the disk."""

import io
import json
import logging
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from click.testing import CliRunner

from blocks import Step
from kvmanager import KVManager, Pool, PoolReport, PoolSpec
from quire.v1 import records_pb2
from services.cli.main import cli
from services.engine.recording import RequestsRecorder
from services.engine.settings import EngineSettings
from services.kvmanager.recorder import OperationsRecorder
from services.kvmanager.settings import KVManagerSettings
from services.runtime.settings import InvalidSetting
from services.wire.records.file import EntryEncoder, RecordFile, create
from services.wire.records.reader import RecordReader
from tests.load import prompt_request
from tests.running_quire import START_SECONDS, Answer, RunningQuire, launch

SECONDS = 60
OPENING = "Blocks of keys and values are kept like pages of memory. "
SPEC = PoolSpec("host:unix:/tmp/engine", 1, "model", 4, 8)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def entries_of(file: BinaryIO) -> tuple[RecordReader, list[records_pb2.RecordEntry]]:
    """Read a record; return its reader, and the entries between header and end."""
    reader = RecordReader(file)
    return reader, list(reader)


def of_file(path: Path) -> tuple[RecordReader, list[records_pb2.RecordEntry]]:
    with path.open("rb") as file:
        return entries_of(file)


HEADER = records_pb2.RecordEntry(header=records_pb2.RecordHeader(format="any", version=3))


def numbered(number: int, size: int = 0) -> records_pb2.RecordEntry:
    return records_pb2.RecordEntry(request=records_pb2.RecordedRequest(number=number, finish="x" * size))


def replayed(path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["replay", str(path), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# Running services


def test_records_of_a_running_quire_replay_to_the_same_ids_and_hits(
    quire: Callable[..., RunningQuire], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path, folder = tmp_path / "requests.quire", tmp_path / "operations"
    records = ("--record-requests", str(path), "--record-folder", str(folder))
    served = quire("--model", str(tiny_model("llama")), "--device-blocks", "64", "--max-sequences", "8", *records)

    def generate(prompt: str, max_tokens: int, seed: int | None = None) -> Answer:
        return served.generate(prompt_request(prompt, max_tokens, seed=seed))

    answers = [generate(OPENING * 2, 20)]
    answers += [generate(OPENING * 2 + answers[0].text, 5), generate(OPENING, 3, seed=1)]
    with ThreadPoolExecutor(6) as clients:
        answers += clients.map(lambda number: generate(f"{OPENING * 3}{number}", 8 + number), range(6))
    assert served.close() == 0
    (operations_path,) = folder.iterdir()

    operations = replayed(operations_path)
    assert operations["right"] is True
    assert operations["steps"] > len(answers)
    assert operations["end"] == "the session ended"

    requests = replayed(path)
    assert requests["requests"] == len(answers)
    assert requests["prompt_tokens"] == sum(answer.started.prompt_tokens for answer in answers)
    assert requests["hit_tokens"] == sum(answer.started.cached_tokens for answer in answers) > 0
    assert requests["output_tokens"] == sum(len(answer.token_ids) for answer in answers)
    assert requests["preemptions"] == requests["recomputed_tokens"] == 0
    assert requests["end"] == "the engine stopped"

    assert mode(operations_path) == mode(path) == 0o600
    assert mode(folder) == 0o700
    served.output.wait_for("token ids included")
    served.output.wait_for("as keys and lengths")
    headers = [of_file(one)[0].header for one in (operations_path, path)]
    assert [header.sensitive.split(";")[0] for header in headers] == ["contains token ids", "no token ids"]
    assert {header.engine_id for header in headers} == {headers[0].pool.engine_id}
    kinds = [entry.request.decoding for entry in of_file(path)[1]]
    assert kinds.count("sampled") == 1


@pytest.mark.parametrize(
    ("label", "option", "setting"),
    [("kvmanager", "--record-folder", "record_folder"), ("engine", "--record-requests", "record_requests")],
)
def test_a_service_that_cannot_record_does_not_start(
    label: str, option: str, setting: str, tiny_model: Callable[[str], Path]
) -> None:
    model = ("--model", str(tiny_model("llama"))) if label == "engine" else ()
    process = launch(label, "--listen", "127.0.0.1:0", *model, option, "/dev/null/records")
    output, _ = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 1
    (line,) = [line for line in output.splitlines() if " failed: " in line]
    assert f"{setting} " in line
    assert "'/dev/null/records'" in line
    assert "Not a directory" in line
    assert "Traceback" not in output


# Files


def test_nothing_is_recorded_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (KVManagerSettings().record_folder, EngineSettings().record_requests) == ("", "")
    monkeypatch.chdir(tmp_path)
    session = KVManager(epoch=1).attach(SPEC)
    recorder = OperationsRecorder(KVManagerSettings().record_folder, KVManagerSettings().record_megabytes)
    recorder.begin(session, PoolReport())
    recorder.record(session, Step(1), session.pool.apply(Step(1)))
    recorder.end(session)
    recorder.close()
    RequestsRecorder(EngineSettings().record_requests).close()
    assert list(tmp_path.iterdir()) == []


def test_only_the_owner_can_read_a_record_and_none_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "record.quire"
    mask = os.umask(0)
    try:
        created = []
        for _ in range(3):
            file, own = create(path)
            file.close()
            created.append(own)
    finally:
        os.umask(mask)
    assert [one.name for one in created] == ["record.quire", "record.quire.2", "record.quire.3"]
    assert {mode(one) for one in created} == {0o600}


def test_a_record_ends_at_its_maximum_size_and_holds_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened, path = create(tmp_path / "record.quire")
    file = RecordFile(opened, "record", max_bytes=5000)
    file.write(lambda: [HEADER])
    for number in range(200):
        file.write(lambda number=number: [numbered(number, size=100)])
    file.finish("not the reason")
    file.join(SECONDS)
    assert file.stopped
    reader, entries = of_file(path)
    assert 4000 < path.stat().st_size <= 5000
    assert reader.end == "the file is full: its limit is 5000 bytes"
    assert [entry.request.number for entry in entries] == list(range(len(entries)))
    assert caplog.messages == ["record: recording stops: the file is full: its limit is 5000 bytes"]


class SlowDisk(io.BytesIO):
    """A file whose writes block until `is_open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = threading.Event()
        self.content = b""

    def write(self, data: Any) -> int:
        assert self.is_open.wait(SECONDS)
        return super().write(data)

    def close(self) -> None:
        self.content = self.getvalue()
        super().close()


def test_a_slow_disk_stops_the_record_and_blocks_no_request(caplog: pytest.LogCaptureFixture) -> None:
    disk = SlowDisk()
    file = RecordFile(disk, "record", max_queued=10)
    file.write(lambda: [HEADER])
    for number in range(1000):  # each returns at once
        file.write(lambda number=number: [numbered(number)])
    assert file.stopped
    disk.is_open.set()
    file.join(SECONDS)
    reader, entries = entries_of(io.BytesIO(disk.content))
    assert [entry.request.number for entry in entries] == list(range(len(entries)))
    assert 9 <= len(entries) <= 11
    assert reader.end == "the disk is too slow: 10 entries are queued"
    assert caplog.messages == ["record: recording stops: the disk is too slow: 10 entries are queued"]


def test_a_full_disk_is_logged_in_one_line_and_ends_only_the_record(caplog: pytest.LogCaptureFixture) -> None:
    file = RecordFile(os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb"), "record")
    file.write(lambda: [HEADER])
    file.join(SECONDS)
    assert file.stopped
    assert file.closed
    file.write(lambda: [numbered(1)])
    file.finish("the session ended")
    assert caplog.messages == ["record: recording stops: OSError: [Errno 28] No space left on device"]


def test_a_failed_write_stops_only_the_record(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    opened, path = create(tmp_path / "record.quire")
    file = RecordFile(opened, "record")
    file.write(lambda: [HEADER])
    file.write(lambda: [numbered(1 // 0)])
    file.join(SECONDS)
    assert path.read_bytes() == EntryEncoder().encode(HEADER)
    assert "recording stops: ZeroDivisionError" in caplog.messages[0]


def test_a_deleted_folder_ends_the_record_and_not_the_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = OperationsRecorder(str(tmp_path / "records"), 1)
    (tmp_path / "records").rmdir()
    session = KVManager(epoch=1).attach(SPEC)
    recorder.begin(session, PoolReport())
    recorder.record(session, Step(1), session.pool.apply(Step(1)))
    recorder.end(session)
    recorder.close()
    (message,) = caplog.messages
    assert message.startswith("session 1 of engine host:unix:/tmp/engine is not recorded: [Errno 2]")


def test_each_session_is_recorded_to_a_file_named_after_engine_and_session(tmp_path: Path) -> None:
    recorder = OperationsRecorder(str(tmp_path), 1)
    manager = KVManager(epoch=1)
    for _ in range(2):
        session = manager.attach(SPEC, Pool(SPEC))
        recorder.begin(session, PoolReport())
    recorder.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split("-")[1] for name in names] == ["host_unix_tmp_engine"] * 2
    assert sorted(name.split("-")[-1] for name in names) == ["1.quire", "2.quire"]
    assert [replayed(tmp_path / name)["end"] for name in names] == ["the KV manager stopped"] * 2


def test_a_record_file_that_cannot_be_created_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidSetting,
        match="record_requests must be a file that can be created, not '/dev/null/file': Not a directory",
    ):
        RequestsRecorder("/dev/null/file")
    with pytest.raises(InvalidSetting, match="record_folder must be a folder for new files, not '/dev/null/folder'"):
        OperationsRecorder("/dev/null/folder", 1)


@pytest.fixture(autouse=True)
def _warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "quire.record")
