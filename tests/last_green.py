"""At which commit the checks beyond `make check` passed last: bench/results/last_green.json.

`python -m tests.last_green` prints them, and how many commits have changed the product, the tests or what deploys it
since. `python -m tests.last_green CHECK COMMAND...` runs pytest for a check, and keeps the commit if all tests passed
and no file differed from it.
"""

import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from bench.report.results import commit_of_tree
from bench.report.staleness import PRODUCT, commits_behind
from bench.report.targets import RESULTS

CHECKS = ("acceptance", "alerts-check", "browser-check", "compose-check", "wheel")
FILE = RESULTS / "last_green.json"
_CODE = (*PRODUCT, "tests", "deploy", "Dockerfile", "docker-compose.yml", "pyproject.toml", "constraints.txt")

Kept = dict[str, dict[str, str | int]]


def kept(file: Path = FILE) -> Kept:
    """Return commit, date, and the tests that passed and were skipped, by check."""
    found: Kept = json.loads(file.read_text()) if file.exists() else {}
    return found


def run(check: str, command: list[str], file: Path = FILE) -> int:
    """Run pytest, keep the commit if it may be kept, and return pytest's status."""
    commit = commit_of_tree()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run([*command, f"--junit-xml={report}"], check=False).returncode
        if status:
            return status
        counts = _counts(report)
    if not commit or commit.endswith("-dirty"):
        sys.stderr.write(f"{check} passed, but {file.name} keeps no commit: files differ from it\n")
        return 0
    now = datetime.now(UTC).date().isoformat()
    rows = kept(file) | {check: {"commit": commit, "date": now, **counts}}
    file.write_text(json.dumps(rows, indent=2, sort_keys=True) + "\n")
    return 0


def _counts(report: Path) -> dict[str, int]:
    suite = ElementTree.parse(report).getroot()[0]
    skipped = int(suite.attrib["skipped"])
    return {"passed": int(suite.attrib["tests"]) - skipped, "skipped": skipped}


def _printed(check: str) -> str:
    if check not in kept():
        return f"{check}: never"
    row = kept()[check]
    behind = commits_behind(str(row["commit"]), _CODE)
    since = "unknown commit" if behind is None else f"{behind} commits of code since"
    return f"{check}: {row['commit']} ({row['date']}), {row['passed']} passed, {row['skipped']} skipped; {since}"


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    sys.stdout.writelines(f"{_printed(one)}\n" for one in CHECKS)
