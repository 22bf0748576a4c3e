"""Write measured figures into the pages: `make readme`; with `--check`, only report stale pages.

A page has blocks, each between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. `performance` is the table of all
targets and their measured values, `headlines` the table of those with a `headline`, `missed` a list of missed targets,
`classes` the speeds of programs by class of CPU, `formats` those of weights by form, and `picture NAME` the picture of
a benchmark. `papers` and `papers pictures` are the papers' figures, and `worked examples` their examples, computed by
the KV manager's core.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.papers import page, worked_examples
from bench.report import formats
from bench.report.pictures import IMAGES, PICTURES
from bench.report.targets import RESULTS, ROOT, met, path_of, results_of, targets

PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("performance.md", "measurements.md", "models.md", "papers.md")),
)
_BLOCK = re.compile(r"(<!-- ([\w -]+): begin -->\n)(.*?)(<!-- \2: end -->)", re.DOTALL)
_SIDES = {"less": "less than", "at most": "at most", "more": "at least"}
NOT_MEASURED = "not measured"
# Workloads, programs and ratios of `bench cpu`, by the parts of metrics' names.
_WORKLOADS = {
    "b1": "1 request, 32/64 tokens",
    "b8": "8, 128/64",
    "b32": "32, 128/64",
    "b32_short": "32, 16/128",
    "ragged": "16, 16 to 2,000/64",
    "first_token_128": "first token, 128",
    "first_token_1024": "1,024",
    "first_token_4096": "4,096",
}
_PROGRAMS = ("quire", "openvino", "vllm")
_RATIOS = {"Quire over the better": "over_the_better_peer", "Quire over the ceiling": "of_the_ceiling"}
_COMMANDS = {"gpu": "make gpu-check", "papers": "make papers", "soak": "make soak"}


def _command(benchmark: str) -> str:
    return _COMMANDS.get(benchmark, f"make bench-{benchmark}")


class Value(NamedTuple):
    """A measured value on one device: `met` is yes or no."""

    device: str
    text: str
    met: str


class Line(NamedTuple):
    """A target and its measured values: `met` is yes (on all devices), no or not measured.

    `headline` is usually empty.
    """

    benchmark: str
    words: str
    headline: str
    values: tuple[Value, ...]
    target: str
    met: str

    @property
    def shown_values(self) -> str:
        """The values with their devices; those that miss the target are bold."""
        shown = (f"{f'**{one.text}**' if one.met == 'no' else one.text} ({one.device})" for one in self.values)
        return ", ".join(shown) or "-"


class Pages:
    """The blocks of pages, from the targets and a folder of results. Links begin at the root of the repository."""

    def __init__(self, results: Path = RESULTS, images: Path = IMAGES) -> None:
        self._targets = targets()
        self._images = images
        self._results = {name: results_of(name, results) for name in self._targets}

    def block(self, name: str) -> str:
        """Return the text of a block. Raises KeyError for an unknown name."""
        if name.startswith("picture "):
            return self._picture(name.removeprefix("picture "))
        blocks = {"performance": self._table, "headlines": self._headlines, "missed": self._missed}
        blocks |= {"classes": self._classes, "worked examples": worked_examples.markdown, "formats": self._formats}
        return {**blocks, "papers": page.table, "papers pictures": page.pictures}[name]()

    def lines(self) -> Iterator[Line]:
        """Yield every target, in the order of the file."""
        for benchmark, group in self._targets.items():
            found = self._results[benchmark].items()
            rows = {device: {row["metric"]: row for row in result["rows"]} for device, result in found}
            for metric, target in group.items():
                if metric != "title":
                    by_device = {device: of_device.get(metric, {}) for device, of_device in rows.items()}
                    yield _line(benchmark, target, by_device)

    def _headlines(self) -> str:
        rows = [
            f"| {line.headline} | {line.shown_values} | {line.target} | {_shown_met(line)} | {self._source(line)} |"
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
                places = "".join(_measured_on(device, result) for device, result in self._results[last].items())
                text.append(f"| **{self._targets[last]['title']}**{places} | | | | |")
            shown = (line.words, line.shown_values, line.target, _shown_met(line), self._source(line))
            text.append(f"| {' | '.join(shown)} |")
        return "\n".join(text)

    def _counts(self) -> str:
        counts = Counter(line.met for line in self.lines())
        return (
            f"Of {counts.total()} targets {counts['yes']} are met, {counts['no']} missed,"
            f" {counts[NOT_MEASURED]} not measured."
        )

    def _source(self, line: Line) -> str:
        name = line.benchmark
        links = [f"[{device}](bench/results/{path_of(name, device, Path())})" for device in self._results[name]]
        return ", ".join(links) or f"`{_command(name)}`"

    def _missed(self) -> str:
        return "\n".join(
            f"* {self._targets[line.benchmark]['title']}. {line.words}"
            f" Measured: {line.shown_values} (target: {line.target})."
            for line in self.lines()
            if line.met == "no"
        )

    def _classes(self) -> str:
        text = [f"| class | program | {' | '.join(_WORKLOADS.values())} |", "|---|---" + "|---" * len(_WORKLOADS) + "|"]
        for device, result in self._results["cpu"].items():
            rows = {row["metric"]: row for row in result["rows"] if row["value"] is not None}
            speeds = {program: [_speed(rows, one, program) for one in _WORKLOADS] for program in _PROGRAMS}
            ratios = {name: [_ratio(rows, f"{one}_{metric}") for one in _WORKLOADS] for name, metric in _RATIOS.items()}
            lines = {**{_name_of(rows, program): cells for program, cells in speeds.items()}, **ratios}
            text += [
                f"| {device} | {name} | {' | '.join(cells)} |" for name, cells in lines.items() if set(cells) != {"-"}
            ]
        return "\n".join(text)

    def _formats(self) -> str:
        return formats.table(self._results["weights"])

    def _picture(self, benchmark: str) -> str:
        path = self._images / f"bench-{benchmark}.png"
        seen = PICTURES[benchmark].seen
        if not path.exists():
            return f"(Not drawn yet: `{_command(benchmark)}`.)"
        return f"![{seen}](docs/images/{path.name})"


def _speed(rows: Mapping[str, Any], workload: str, program: str) -> str:
    """Return a program's tokens per second, or its milliseconds to the first token."""
    unit = "ms" if workload.startswith("first_token") else "tokens_per_second"
    row = rows.get(f"{workload}_{program}_{unit}")
    return f"{row['value']:,.0f}{' ms' if unit == 'ms' else ''}" if row else "-"


def _ratio(rows: Mapping[str, Any], metric: str) -> str:
    return _shown(rows[metric]["value"], "ratio") if metric in rows else "-"


def _name_of(rows: Mapping[str, Any], program: str) -> str:
    row = rows.get(f"b1_{program}_tokens_per_second", {})
    return row.get("peer") or program.capitalize()


def _line(benchmark: str, target: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> Line:
    """Make the line of a target from its rows by device."""
    measured = {device: row for device, row in rows.items() if row.get("value") is not None}
    one: Mapping[str, Any] = next(iter([*measured.values(), *rows.values()]), {})
    unit, peer = one.get("unit", "ratio"), one.get("peer")
    wanted = f"{_SIDES[target['better']]} {_shown(target['target'], unit)}" + (
        f" ({peer.replace('_', ' ')})" if peer else ""
    )
    values = tuple(
        Value(device, _shown(row["value"], unit), "yes" if met(row["value"], dict(target)) else "no")
        for device, row in measured.items()
    )
    reached = "no" if any(one.met == "no" for one in values) else "yes" if values else NOT_MEASURED
    return Line(benchmark, target["words"], target.get("headline", ""), values, wanted, reached)


def _shown_met(line: Line) -> str:
    return f"**{line.met}**" if line.met == "no" else line.met


def _shown(value: float, unit: str) -> str:
    if unit == "share":
        return f"{100 * value:.3g} %"
    return f"{value:,.4g}" + ("" if unit in ("ratio", "1") else f" {unit}")


def _measured_on(device: str, result: Mapping[str, Any]) -> str:
    """Return the device, the machine, the commit and the day of a result."""
    hardware = result["hardware"]
    machine = hardware.get("gpu") or f"{hardware['cores']} cores of {hardware['cpu']}"
    day = f", {result['started'][:10]}" if "started" in result else ""
    return f"; {device}: {machine} ({result['commit']}{day})"


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
    stale = [path for path in PAGES if filled(path, pages) != path.read_text()]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run make readme", file=sys.stderr)
        else:
            path.write_text(filled(path, pages))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
