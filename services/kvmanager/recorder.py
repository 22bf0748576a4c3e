"""Records the operations of each session in a file, if a folder is configured."""

import re
import tempfile
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from blocks import Step
from kvmanager import AppliedStep, PoolReport, Session
from services.runtime.settings import InvalidSetting
from services.wire.records.file import RecordFile, create, log
from services.wire.records.operations import OperationsRecord

_MIB = 1024 * 1024
_CLOSE_SECONDS = 10.0
_MAX_NAME_LENGTH = 80


class OperationsRecorder:
    """Records sessions; does nothing without a folder. Only creating a file waits for the disk."""

    def __init__(self, folder: str, megabytes: int) -> None:
        """Create the folder if it does not exist. Raises InvalidSetting if no file can be created in it."""
        self._folder = Path(folder) if folder else None
        self._max_bytes = megabytes * _MIB
        self._sessions: dict[int, tuple[OperationsRecord, RecordFile]] = {}
        self._files: list[RecordFile] = []  # not closed yet
        if self._folder:
            _prepare(self._folder)

    @property
    def records(self) -> bool:
        """Whether sessions are recorded."""
        return self._folder is not None

    def begin(self, session: Session, report: PoolReport) -> None:
        """Begin the record of a session that adopted this report, which must not change."""
        if not self._folder:
            return
        spec = session.pool.spec
        try:
            opened, path = create(self._folder / _file_name(spec.engine_id, session.number))
        except OSError as error:
            log.warning("session %d of engine %s is not recorded: %s", session.number, spec.engine_id, error)
            return
        record = OperationsRecord(spec)
        file = RecordFile(opened, str(path), max_bytes=self._max_bytes)
        file.write(partial(record.begin, report))
        self._sessions[session.number] = (record, file)
        self._files = [*(one for one in self._files if not one.closed), file]
        log.info("%s: the operations of engine %s are recorded, token ids included", path, spec.engine_id)

    def record(self, session: Session, step: Step, applied: AppliedStep) -> None:
        """Record a block step."""
        if session.number in self._sessions:
            record, file = self._sessions[session.number]
            file.write(partial(record.applied, step, applied))

    def end(self, session: Session) -> None:
        """End the record of a session."""
        if session.number in self._sessions:
            _, file = self._sessions.pop(session.number)
            file.finish("the session ended")

    def close(self) -> None:
        """End all records, and wait up to 10 seconds per file until they are on disk."""
        for file in self._files:
            file.finish("the KV manager stopped")
        for file in self._files:
            file.join(_CLOSE_SECONDS)


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidSetting(f"record_folder must be a folder for new files, not {str(folder)!r}: {error}") from error


def _file_name(engine_id: str, session: int) -> str:
    plain = re.sub(r"[^A-Za-z0-9.-]+", "_", engine_id)[:_MAX_NAME_LENGTH]
    return f"operations-{plain}-{datetime.now(UTC):%Y%m%dT%H%M%S}-{session}.quire"
