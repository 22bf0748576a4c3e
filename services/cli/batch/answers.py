"""The file of answers: what an earlier run has left in it, and the answers that are appended."""

import fcntl
import json
import os
from array import array
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from services.cli.batch.lines import Line, fingerprint_of, key_of

_SUCCESS = 200
_ID = "batch_req_"


class UnusableFile(Exception):
    """The file of answers cannot be continued; the message has the reason."""


class KnownAnswers:
    """Keys and fingerprints of answers: 16 bytes for each, in memory."""

    def __init__(self) -> None:
        self._keys = array("Q")
        self._fingerprints = array("Q")
        self._sorted: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: int, fingerprint: int) -> None:
        """Add an answer; none can be added after the first `find`."""
        self._keys.append(key)
        self._fingerprints.append(fingerprint)

    def find(self, key: int) -> int | None:
        """Return the fingerprint of the answer with a key."""
        if self._sorted is None:
            keys, fingerprints = (np.asarray(one, dtype=np.uint64) for one in (self._keys, self._fingerprints))
            order = np.argsort(keys, kind="stable")
            self._sorted = keys[order], fingerprints[order]
        keys, fingerprints = self._sorted
        place = int(np.searchsorted(keys, np.uint64(key)))
        return int(fingerprints[place]) if place < len(keys) and int(keys[place]) == key else None


class AnswerFile:
    """A locked file of answers, one a line. It is neither created nor changed before `begin`."""

    def __init__(self, path: Path) -> None:
        """Read the answers of the file, if there is one. Raises UnusableFile."""
        self.known = KnownAnswers()
        self.failures = 0  # of the answers that were there
        self._path = path
        self._end = 0  # in bytes, of the whole lines that were there
        self._file: BinaryIO | None = None
        if not path.exists():
            return
        self._file = self._locked()
        try:
            self._read()
        except UnusableFile:
            self._file.close()
            raise

    def begin(self) -> None:
        """Create the file, or remove the torn last line of an interrupted run. Raises UnusableFile."""
        if self._file is None:
            self._file = self._locked()
            if self._file.seek(0, os.SEEK_END):
                self._file.close()
                raise UnusableFile(f"another run writes to {self._path}")
        self._file.truncate(self._end)

    def append(self, answer: dict[str, Any]) -> None:
        """Append an answer. It is in the file when this returns."""
        text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        # UTF-8 has no unpaired surrogates, as in texts of other servers: they stay JSON's escapes.
        self._opened.write(text.encode(errors="backslashreplace") + b"\n")
        self._opened.flush()

    def close(self) -> None:
        """Store the file durably, and release it."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def custom_ids(self) -> Iterator[str]:
        """Yield the ids of all answers that were there, where they have one."""
        self._opened.seek(0)
        while self._opened.tell() < self._end:
            if isinstance(custom_id := json.loads(self._opened.readline())["custom_id"], str):
                yield custom_id

    def request_ids(self, custom_ids: Collection[str]) -> dict[str, str]:
        """Return the ids of the requests that were answered for these ids, with those of this run."""
        self._opened.seek(0)
        answers = (json.loads(content) for content in self._opened)
        found = [one for one in answers if one["custom_id"] in custom_ids and one["response"]]
        return {one["custom_id"]: one["response"]["request_id"] for one in found}

    @property
    def _opened(self) -> BinaryIO:
        assert self._file is not None, "begin comes first"
        return self._file

    def _locked(self) -> BinaryIO:
        try:
            file = self._path.open("a+b")
        except OSError as error:
            raise UnusableFile(f"{self._path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise UnusableFile(f"another run writes to {self._path}") from error
        return file

    def _read(self) -> None:
        self._opened.seek(0)
        for number, content in enumerate(self._opened, start=1):
            if not content.endswith(b"\n"):
                break  # the write of an earlier run was cut off
            self._add(number, content)
            self._end += len(content)

    def _add(self, number: int, content: bytes) -> None:
        try:
            answer = json.loads(content)
            custom_id, response, error = answer["custom_id"], answer["response"], answer["error"]
            line = 0 if custom_id is not None else error["line"]
            given = str(answer["id"])
        except (ValueError, KeyError, TypeError):
            given = ""
        if not given.startswith(_ID):
            raise UnusableFile(f"line {number} of {self._path} is no answer of quire run-batch: give another file")
        self.known.add(key_of(custom_id, line), fingerprint_of(given))
        self.failures += bool(error) or response is None or response["status_code"] != _SUCCESS


def refused_line(line: Line) -> dict[str, Any]:
    """Return the answer to a line that is no request."""
    message = f"line {line.number}: {line.fault}"
    error = {"code": "invalid_line", "message": message, "line": line.number}
    return {"id": line.answer_id, "custom_id": line.custom_id, "response": None, "error": error}


def answered(line: Line, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """Return the answer to a request. An error of HTTP is in the response as the server wrote it, and in `error`."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    error = None
    if status != _SUCCESS:
        message = f"line {line.number}: {message_of(body) or f'status {status}'}"
        error = {"code": _error_of(body).get("code") or f"status_{status}", "message": message, "line": line.number}
    return {"id": line.answer_id, "custom_id": line.custom_id, "response": response, "error": error}


def message_of(body: Any) -> str:
    """Return the message of an error's body."""
    return str(_error_of(body).get("message", ""))


def _error_of(body: Any) -> dict[str, Any]:
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}
