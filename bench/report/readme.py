"""Write measured figures into the pages: `make readme`; with `--check`, only report stale pages.

A page has blocks, each between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. `performance` is the table of all
targets and their measured values, `headlines` the table of those with a `headline`, `missed` a list of missed targets,
and `picture NAME` the picture of a benchmark.
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
    """A target and its measured value: `met` is yes, no or not measured. `headline` is usually empty."""

    benchmark: str
    words: str
    headline: str
    value: str
    target: str
    met: str


class Pages:
    """The blocks of pages, from the targets and a folder of results. Links begin at the root of the repository."""

    def __init__(self, results: Path = RESULTS, images: Path = IMAGES) -> None:
        self._targets = targets()
        self._images = images
        self._results: dict[str, Mapping[str, Any]] = {}
        for name in self._targets:
            path = results / f"{name}.json"
            self._results[name] = json.loads(path.read_text()) if path.exists() else {}

    def block(self, name: str) -> str:
        """Return the text of a block. Raises KeyError for an unknown name."""
        if name.startswith("picture "):
            return self._picture(name.removeprefix("picture "))
        return {"performance": self._table, "headlines": self._headlines, "missed": self._missed}[name]()

    def lines(self) -> Iterator[Line]:
        """Yield every target, in the order of the file."""
        for benchmark, group in self._targets.items():
            rows = {row["metric"]: row for row in self._results[benchmark].get("rows", ())}
            for metric, target in group.items():
                if metric != "title":
                    yield _line(benchmark, target, rows.get(metric, {}))

    def _headlines(self) -> str:
        rows = [
            f"| {line.headline} | {line.value} | {line.target} | {_shown_met(line)} | {self._source(line)} |"
            for line in self.lines()
            if line.headline
        ]
        return "\n".join(
            [self._counts(), "", "| what | measured | target | met | from |", "|---|---|---|---|---|", *rows]
        )

    def _table(self) -> str:
        text = [self._counts(), "", "| target | measured | bound or peer | met | from |", "|---|---|---|---|---|"]
        last = ""
        for line in self.lines():
            if line.benchmark != last:
                last = line.benchmark
                text.append(f"| **{self._targets[last]['title']}**{_measured_on(self._results[last])} | | | | |")
            text.append(f"| {line.words} | {line.value} | {line.target} | {_shown_met(line)} | {self._source(line)} |")
        return "\n".join(text)

    def _counts(self) -> str:
        counts = Counter(line.met for line in self.lines())
        return (
            f"Of {counts.total()} targets {counts['yes']} are met, {counts['no']} missed,"
            f" {counts[NOT_MEASURED]} not measured."
        )

    def _source(self, line: Line) -> str:
        name = line.benchmark
        return f"[{name}](bench/results/{name}.json)" if self._results[name] else f"`{_command(name)}`"

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
    words, headline = target["words"], target.get("headline", "")
    wanted = f"{_SIDES[target['better']]} {_shown(target['target'], unit)}" + (
        f" ({peer.replace('_', ' ')})" if peer else ""
    )
    if value is None:
        return Line(benchmark, words, headline, "-", wanted, NOT_MEASURED)
    reached = "yes" if met(value, dict(target)) else "no"
    return Line(benchmark, words, headline, _shown(value, unit), wanted, reached)


def _shown_met(line: Line) -> str:
    return f"**{line.met}**" if line.met == "no" else line.met


def _shown(value: float, unit: str) -> str:
    if unit == "share":
        return f"{100 * value:.3g} %"
    return f"{value:,.4g}" + ("" if unit in ("ratio", "1") else f" {unit}")


def _measured_on(result: Mapping[str, Any]) -> str:
    """Return the machine, the commit and the day of a result."""
    if not result:
        return ""
    hardware = result["hardware"]
    machine = hardware.get("gpu") or f"{hardware['cores']} cores of {hardware['cpu']}"
    day = f", {result['started'][:10]}" if "started" in result else ""
    return f", on {machine} ({result['commit']}{day})"


def filled(page: Path, pages: Pages) -> str:
    """Return a page's text with all its blocks generated."""
    upwards = "../" * len(page.relative_to(ROOT).parent.parts)

    def fill(match: re.Match[str]) -> str:
        text = re.sub(r"\]\((?=bench/|docs/)", f"]({upwards}", pages.block(match[2]))
        return f"{match[1]}{text}\n{match[4]}"

    return _BLOCK.sub(fill, page.read_text())


def main(check: bool) -> int:
    """Write the pages, or only report stale ones; return the exit status."""
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
