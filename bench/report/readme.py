"""Writes into the pages what was measured: `make readme`; with `--check` it only says whether a page is stale.

A page has blocks, each between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. `performance` is the table of all
targets and what was reached, `headlines` that of the groups that say they are `headline`, `missed` a list of those that
were not, and `picture NAME` what a benchmark drew.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.report.pictures import IMAGES, PICTURES
from bench.report.targets import RESULTS, ROOT, met, targets

PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
_BLOCK = re.compile(r"(<!-- ([\w -]+): begin -->\n)(.*?)(<!-- \2: end -->)", re.DOTALL)
_SIDES = {"less": "less than", "at most": "at most", "more": "at least"}
NOT_MEASURED = "not measured"
_COMMANDS = {"gpu": "make gpu-check"}


def _command(benchmark: str) -> str:
    return _COMMANDS.get(benchmark, f"make bench-{benchmark}")


class Line(NamedTuple):
    """A target, and what was measured of it: `met` is yes, no or not measured."""

    benchmark: str
    words: str
    value: str
    target: str
    met: str


class Pages:
    """The blocks, made from the targets and a folder of results; their links begin at the root of the repository."""

    def __init__(self, results: Path = RESULTS, images: Path = IMAGES) -> None:
        self._targets = targets()
        self._images = images
        self._results: dict[str, Mapping[str, Any]] = {}
        for name in self._targets:
            path = results / f"{name}.json"
            self._results[name] = json.loads(path.read_text()) if path.exists() else {}

    def block(self, name: str) -> str:
        """Return what belongs into the block of this name. Raises KeyError for a name that is none."""
        if name.startswith("picture "):
            return self._picture(name.removeprefix("picture "))
        return {"performance": self._table, "headlines": self._headlines, "missed": self._missed}[name]()

    def lines(self) -> Iterator[Line]:
        """Yield every target, in the order of the file."""
        for benchmark, group in self._targets.items():
            rows = {row["metric"]: row for row in self._results[benchmark].get("rows", ())}
            for metric, target in group.items():
                if metric not in ("title", "headline"):
                    yield _line(benchmark, target, rows.get(metric, {}))

    def _headlines(self) -> str:
        return self._table(only="headline")

    def _table(self, only: str = "title") -> str:
        lines = list(self.lines())
        counts = Counter(line.met for line in lines)
        unknown = counts[NOT_MEASURED]
        text = [
            f"Of {len(lines)} targets {counts['yes']} are met, {counts['no']} missed, {unknown} not measured.",
            "",
            "| what was promised | measured | target or peer | met | from |",
            "|---|---|---|---|---|",
        ]
        last = ""
        for line in lines:
            if not self._targets[line.benchmark].get(only):
                continue
            if line.benchmark != last:
                last = line.benchmark
                text.append(f"| **{self._targets[last]['title']}**{_measured_on(self._results[last])} | | | | |")
            result = f"[{last}](bench/results/{last}.json)" if self._results[last] else f"`{_command(last)}`"
            shown = f"**{line.met}**" if line.met == "no" else line.met
            text.append(f"| {line.words} | {line.value} | {line.target} | {shown} | {result} |")
        return "\n".join(text)

    def _missed(self) -> str:
        return "\n".join(
            f"* {self._targets[line.benchmark]['title']}. {line.words} Measured: {line.value} (target: {line.target})."
            for line in self.lines()
            if line.met == "no"
        )

    def _picture(self, benchmark: str) -> str:
        path = self._images / f"bench-{benchmark}.png"
        seen = PICTURES[benchmark].seen
        if not path.exists():
            return f"(Not drawn yet: `{_command(benchmark)}`.)"
        return f"![{seen}](docs/images/{path.name})"


def _line(benchmark: str, target: Mapping[str, Any], row: Mapping[str, Any]) -> Line:
    value, unit, peer = row.get("value"), row.get("unit", "ratio"), row.get("peer")
    wanted = f"{_SIDES[target['better']]} {_shown(target['target'], unit)}" + (
        f" ({peer.replace('_', ' ')})" if peer else ""
    )
    if value is None:
        return Line(benchmark, target["words"], "-", wanted, NOT_MEASURED)
    return Line(benchmark, target["words"], _shown(value, unit), wanted, "yes" if met(value, dict(target)) else "no")


def _shown(value: float, unit: str) -> str:
    if unit == "share":
        return f"{100 * value:.3g} %"
    return f"{value:,.4g}" + ("" if unit in ("ratio", "1") else f" {unit}")


def _measured_on(result: Mapping[str, Any]) -> str:
    """Say on which machine, and of which commit."""
    if not result:
        return ""
    hardware = result["hardware"]
    machine = hardware.get("gpu") or f"{hardware['cores']} cores of {hardware['cpu']}"
    day = f", {result['started'][:10]}" if "started" in result else ""
    return f", on {machine} ({result['commit']}{day})"


def filled(page: Path, pages: Pages) -> str:
    """Return a page's text with all its blocks made anew."""
    upwards = "../" * len(page.relative_to(ROOT).parent.parts)

    def fill(match: re.Match[str]) -> str:
        text = re.sub(r"\]\((?=bench/|docs/)", f"]({upwards}", pages.block(match[2]))
        return f"{match[1]}{text}\n{match[4]}"

    return _BLOCK.sub(fill, page.read_text())


def main(check: bool) -> int:
    """Write the pages, or say which of them are stale; return the exit status."""
    pages = Pages()
    stale = [page for page in PAGES if filled(page, pages) != page.read_text()]
    for page in stale:
        if check:
            print(f"{page.relative_to(ROOT)} is stale: run make readme", file=sys.stderr)
        else:
            page.write_text(filled(page, pages))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
