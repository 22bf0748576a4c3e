"""The record of an engine's requests, as a file."""

import secrets
from pathlib import Path

from engine.run.record import RequestsRecord
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence_group import Group
from services.runtime.settings import InvalidSetting
from services.wire.records.file import RecordFile, create, log
from services.wire.records.requests import header_entry, request_entry

_LAST_SECONDS = 10.0
_SECRET_BYTES = 32


class RequestsRecorder:
    """Records requests when they end; does nothing without a path. No call waits for the disk."""

    def __init__(self, path: str) -> None:
        """Create the file. Raises InvalidSetting if that is not possible."""
        self._record: RequestsRecord | None = None
        self._file: RecordFile | None = None
        self._opened = None
        if path:
            try:
                self._opened = create(Path(path))
            except OSError as error:
                reason = error.strerror or error
                raise InvalidSetting(
                    f"record_requests must be a file that can be created, not {path!r}: {reason}"
                ) from error

    def begin(self, scheduler: Scheduler, engine_id: str) -> None:
        """Start the record of this scheduler's requests."""
        if self._opened is None:
            return
        opened, path = self._opened
        self._record = RequestsRecord(scheduler, secrets.token_bytes(_SECRET_BYTES))
        self._file = RecordFile(opened, str(path))
        header = header_entry(self._record.settings, engine_id)
        self._file.write(lambda: [header])
        log.info("%s: requests are recorded, as keys and lengths", path)

    def ended(self, group: Group, arrival_step: int, end_step: int) -> None:
        """Record a request that has ended and no longer changes."""
        if (record := self._record) and self._file:
            self._file.write(lambda: map(request_entry, record.describe(group, arrival_step, end_step)))

    def close(self) -> None:
        """End the record, and wait a few seconds at most until it is on the disk."""
        if self._file:
            self._file.finish("the engine stopped")
            self._file.join(_LAST_SECONDS)
        elif self._opened:
            self._opened[0].close()
