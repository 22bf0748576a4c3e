"""Compares the lines of a batch with the answers of an earlier run, before anything is computed."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.cli.batch.answers import AnswerFile, UnusableFile
from services.cli.batch.lines import Line, fingerprint_of, key_of, read


class InvalidBatch(Exception):
    """The file of requests cannot be run as a whole; the message has the reason."""


@dataclass(frozen=True)
class BatchPlan:
    """The lines of a file that have no answer yet; `lines` and `kept` count all lines and those with one."""

    path: Path
    name: str
    answers: AnswerFile
    lines: int
    kept: int

    @classmethod
    def of(cls, path: Path, answers: AnswerFile, name: str = "", explained: Iterable[str] = ()) -> "BatchPlan":
        """Read the whole file, which messages call `name`.

        Raises InvalidBatch for an id used twice or an id in `explained` that it lacks, UnusableFile for answers to
        other lines.
        """
        name = name or str(path)
        keys, kept = array("Q"), 0
        for line in read(path):
            keys.append(line.key)
            kept += is_answered(line, answers)
        _check_unique(path, name, keys)
        if missing := [one for one in explained if key_of(one, 0) not in keys]:
            raise InvalidBatch(f"{name} has no custom_id {missing[0]!r}, which --explain names")
        if kept < len(answers.known):
            _refuse_unknown(name, answers, keys)
        return cls(path, name, answers, len(keys), kept)

    def open_lines(self) -> Iterator[Line]:
        """Yield the lines without an answer."""
        return (line for line in read(self.path) if not is_answered(line, self.answers))


def is_answered(line: Line, answers: AnswerFile) -> bool:
    """Return whether the file has the answer to a line. Raises UnusableFile if the line was another one then."""
    found = answers.known.find(line.key)
    if found is not None and found != fingerprint_of(line.answer_id):
        name = f" ({line.custom_id})" if line.custom_id else ""
        raise UnusableFile(f"line {line.number}{name} has changed since it was answered: give another file for answers")
    return found is not None


def _check_unique(path: Path, name: str, keys: "array[int]") -> None:
    values, counts = np.unique(np.asarray(keys, dtype=np.uint64), return_counts=True)
    repeated = {int(key) for key in values[counts > 1]}
    first: dict[str, int] = {}
    for line in read(path) if repeated else ():
        if line.custom_id is None or line.key not in repeated:
            continue
        if line.custom_id in first:
            raise InvalidBatch(
                f"{name}: lines {first[line.custom_id]} and {line.number} have the same custom_id {line.custom_id!r}"
            )
        first[line.custom_id] = line.number


def _refuse_unknown(name: str, answers: AnswerFile, keys: "array[int]") -> None:
    known = np.unique(np.asarray(keys, dtype=np.uint64))
    unknown = (one for one in answers.custom_ids() if not np.isin(np.uint64(key_of(one, 0)), known))
    custom_id = next(unknown, None)
    example = f", such as custom_id {custom_id!r}" if custom_id is not None else ""
    raise UnusableFile(f"there are answers to requests that are not in {name}{example}: give another file for answers")
