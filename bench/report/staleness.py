"""How far results are behind the code that they measured: `python -m bench.report.staleness` prints it by benchmark."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from bench.report.targets import ROOT, results_of, targets
from services.loadgen.report.machine import output_of

# Of a result that does not name what it measured.
PRODUCT = ("blocks", "engine", "kvmanager", "services", "protos")
_HASH = re.compile(r"[0-9a-f]{7,40}")


def commits_behind(commit: str | None, code: Sequence[str], at: str = "HEAD") -> int | None:
    """Return how many commits changed the code after `commit`, as of the commit `at`.

    None if the repository does not have the commit, or not as an ancestor of `at`.
    """
    name = (commit or "").removesuffix("-dirty").rpartition("-g")[2]
    if not _HASH.fullmatch(name) or not is_ancestor(name, at):
        return None
    counted = output_of(["git", "rev-list", "--count", f"{name}..{at}", "--", *code], ROOT)
    return None if counted is None else int(counted)


@cache
def is_ancestor(commit: str, of: str) -> bool:
    """Return whether a commit is in the history of another one."""
    return output_of(["git", "merge-base", "--is-ancestor", commit, of], ROOT) is not None


def has_history() -> bool:
    """Return whether this is a checkout with its whole history, so that staleness can be computed."""
    return output_of(["git", "rev-parse", "--is-shallow-repository"], ROOT) == "false"


def code_of(row: Mapping[str, Any]) -> Sequence[str]:
    """Return the paths of the code that a row measured."""
    found: Sequence[str] = row.get("code") or PRODUCT
    return found


def _lines() -> list[tuple[str, str, str, str]]:
    """Return benchmark, device, commit, and how far it is behind, for every file of results."""
    lines = []
    for benchmark in targets():
        for device, result in results_of(benchmark).items():
            behind = commits_behind(result["commit"], code_of(next(iter(result["rows"]), {})))
            shown = "unknown commit" if behind is None else str(behind)
            lines.append((benchmark, device, str(result["commit"]), shown))
    return sorted(lines, key=lambda line: (line[3] == "0", line))


def main() -> None:
    """Print a table of all results, the stale ones first."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "benchmark", "device", "commit", "commits behind", title="Results and the code they measured, as of HEAD"
    )
    for line in _lines():
        table.add_row(*line)
    Console().print(table)


if __name__ == "__main__":
    main()
