"""Counts the files that one more of a kind took: `make amplification`.

Each kind has a commit that added one, found by its subject, so that it is found after a rebase too. Generated files do
not count, nor pages that changed only where `make readme` writes. Files of the product are those of its packages.
"""

import re
import subprocess

from bench.report.results import Row, publish, row
from bench.report.targets import RESULTS, ROOT
from services.runtime import ports

_BENCHMARK = "amplification"
_PRODUCT = ("blocks/", "kvmanager/", "engine/", "services/", "protos/", "start_quire.py")
_COMMITS = {
    "sampling_parameter": "engine: sample with top_n_sigma",
    "constrained_setting": "engine: let n-grams have a minimum of tokens before they propose",
    "metric_with_panel": "gateway: count requests that are refused for a field",
    "chart_value": "helm: let clusters limit the former ReplicaSets that stay",
}
# The last commit before requests and settings were declared once.
_BEFORE = "docs: what operators asked about prefixes and long prompts"
_GENERATED = re.compile(
    r"_pb2(_grpc)?\.pyi?$|^helm/quire/(README\.md|[\w.]+\.json|dashboards/|rules/)|^deploy/compose/settings/"
    r"|^deploy/prometheus/alerts(-gpu)?\.yml$|^tests/deployment/helm/golden/|^docs/images/|^bench/results/|\.binpb$"
)
_BLOCK = re.compile(r"(<!-- ([\w -]+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)


def main() -> None:
    """Count, print and write the rows."""
    rows = [one for kind, subject in _COMMITS.items() for one in _rows(kind, edited(commit_of(subject)))]
    rows.append(_row("default_port_files", len(files_with(ports.GATEWAY.grpc)), "files"))
    before, now = (product_lines(commit) for commit in (commit_of(_BEFORE), "HEAD"))
    rows += [_row("product_lines_over_before", round(now / before, 4), "ratio"), _row("product_lines", now, "lines")]
    publish(_BENCHMARK, rows, 1, RESULTS)


def commit_of(subject: str) -> str:
    """Return the latest commit with this subject. Raises LookupError."""
    for line in _git("log", "--format=%H %s").splitlines():
        commit, _, found = line.partition(" ")
        if found == subject:
            return commit
    raise LookupError(f"no commit has the subject {subject!r}")


def edited(commit: str) -> list[str]:
    """Return the files that a commit changed by hand."""
    names = _git("diff-tree", "--no-commit-id", "--name-only", "-r", commit).splitlines()
    return [name for name in names if not _GENERATED.search(name) and _by_hand(commit, name)]


def files_with(port: int) -> list[str]:
    """Return the files of the product that have a port."""
    found = _git("grep", "-lw", str(port), "HEAD", "--", *_PRODUCT).splitlines()
    return [name for name in found if not _GENERATED.search(name)]


def product_lines(commit: str) -> int:
    """Return the lines of the product's text files at a commit."""
    counted = _git("grep", "-Ic", "", commit, "--", *_PRODUCT).splitlines()
    named = [line.removeprefix(f"{commit}:").rpartition(":") for line in counted]
    return sum(int(count) for name, _, count in named if not _GENERATED.search(name))


def _rows(kind: str, names: list[str]) -> list[Row]:
    found = [_row(f"{kind}_files", len(names), "files")]
    if kind == "sampling_parameter":
        found.append(_row(f"{kind}_product_files", sum(name.startswith(_PRODUCT) for name in names), "files"))
    return found


def _row(metric: str, value: float, unit: str) -> Row:
    return row(_BENCHMARK, metric, value, unit, exact=True)


def _by_hand(commit: str, name: str) -> bool:
    """Whether a file changed outside the blocks of a page that are generated."""
    if not name.endswith(".md"):
        return True
    texts = (_git("show", f"{one}:{name}", check=False) for one in (f"{commit}^", commit))
    before, after = (_BLOCK.sub(r"\1\3", text) for text in texts)
    return before != after


def _git(*arguments: str, check: bool = True) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=check, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
