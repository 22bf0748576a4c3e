"""Which tests run a line, and which of them to run first."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import coverage
from coverage.numbits import numbits_to_nums

# Tests in the process of pytest are fast and exact; those that start services follow, as long as there is time.
IN_PROCESS_SECONDS = 30.0
WITH_SERVICES_SECONDS = 60.0
# What services run belongs to the test that started them, or to all tests of a file where a fixture of it did.
_SETUP = " (setup)"
_PHASES = (_SETUP, " (call)", " (teardown)")


@dataclass(frozen=True)
class Selection:
    """Tests by node id, the fastest first, and how long they took, in seconds."""

    node_ids: tuple[str, ...]
    seconds: float


class TestMap:
    """The tests of each line, from a coverage file with contexts and a file of seconds and outcomes.

    Tests that failed without a fault find none.
    """

    __test__ = False

    def __init__(self, data_file: Path, seconds_file: Path, root: Path) -> None:
        self._root = root
        self._seconds: dict[str, float] = defaultdict(float)
        failed: set[str] = set()
        for line in seconds_file.read_text().splitlines():
            node_id, seconds, outcome = json.loads(line)
            self._seconds[node_id] += seconds
            if outcome == "failed":
                failed.add(node_id)
        for node_id in failed:
            del self._seconds[node_id]
        self._of_file: dict[str, list[str]] = defaultdict(list)
        for node_id in self._seconds:
            self._of_file[node_id.split("::")[0]].append(node_id)
        self._contexts = _contexts_by_line(data_file, root)

    def select(self, path: str, line: int) -> Selection:
        """Choose the tests that run a line of a file; for lines that run at import only, those that run any line."""
        in_process: set[str] = set()
        with_services: set[str] = set()
        of_file = self._contexts.get(path, {})
        contexts = set(of_file.get(line, ()))
        if contexts == {""}:
            contexts = {context for others in of_file.values() for context in others}
        for context in contexts:
            if context in self._seconds:
                in_process.add(context)
                continue
            for phase in _PHASES:
                if context.endswith(phase):
                    node_id = context.removesuffix(phase)
                    file = node_id.split("::")[0]
                    with_services.update(self._of_file[file] if phase == _SETUP else [node_id])
        chosen = self._fastest(in_process, IN_PROCESS_SECONDS)
        chosen += self._fastest(with_services - in_process, WITH_SERVICES_SECONDS)
        return Selection(tuple(chosen), sum(self._seconds[one] for one in chosen))

    def _fastest(self, node_ids: Iterable[str], most_seconds: float) -> list[str]:
        chosen: list[str] = []
        total = 0.0
        for node_id in sorted(node_ids, key=lambda one: (self._seconds[one], one)):
            total += self._seconds[node_id]
            if total > most_seconds and chosen:
                break
            chosen.append(node_id)
        return chosen


def _contexts_by_line(data_file: Path, root: Path) -> dict[str, dict[int, list[str]]]:
    """Read each file's lines and their contexts; with branches measured, lines are the ends of arcs."""
    by_line: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    database = sqlite3.connect(data_file)
    names = dict(database.execute("select id, path from file"))
    contexts = dict(database.execute("select id, context from context"))
    paths = {number: str(Path(name).relative_to(root)) for number, name in names.items()}
    for file, context, first, last in database.execute("select file_id, context_id, fromno, tono from arc"):
        for line in {first, last}:
            if line > 0:
                by_line[paths[file]][line].append(contexts[context])
    for file, context, bits in database.execute("select file_id, context_id, numbits from line_bits"):
        for line in numbits_to_nums(bits):
            by_line[paths[file]][line].append(contexts[context])
    database.close()
    return by_line


def branch_share(data_file: Path, settings: Path) -> float:
    """Return the covered share of lines and branches together, as coverage computes it."""
    measured = coverage.Coverage(data_file=str(data_file), config_file=str(settings))
    measured.load()
    with Path("/dev/null").open("w") as nowhere:
        return measured.report(file=nowhere) / 100
