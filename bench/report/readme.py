"""Fills the generated blocks of README.md and docs/ from results and declarations (`make readme`).

`--check` writes nothing and fails if a page would change. A block stands between `<!-- NAME: begin -->` and
`<!-- NAME: end -->`. Its name selects what it shows:

* `performance`: all targets with their measured values; `headlines`: only the targets that have a `headline`;
* `classes`: speeds by class of CPU; `formats` and `published`: speeds by format of the weights;
* `picture NAME`: the picture of a benchmark;
* `papers`, `papers pictures`: the papers' figures; `worked examples`: their examples, run on the KV manager's core;
* `fields of gRPC`, `fields of HTTP`: the fields of a request, from the rules in the protos;
* `requirements`: settings that exclude each other; `members without effect`: the request members that have none;
* `counts of types`, `served types`, `refused types`, `other types`: the results of `make models`;
* `dialect differences`: where Quire and vLLM parse an answer differently.

Each page names a commit. A result is stale if its code changed between the commit that was measured and that one. So
the check fails if a page hides that a result is stale, but not because code has changed since the page was written.
"""

import re
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.declared import tables
from bench.dialects import page as dialects_page
from bench.formats import table as published
from bench.papers import page, worked_examples
from bench.report import formats, model_types
from bench.report.pictures import IMAGES, PICTURES
from bench.report.staleness import code_of, commits_behind, has_history, is_ancestor
from bench.report.targets import RESULTS, ROOT, path_of, results_of, targets
from bench.report.verdict import MEETS, Run, verdict
from services.loadgen.report.machine import output_of

PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / name
        for name in (
            "performance.md",
            "measurements.md",
            "models.md",
            "model-types.md",
            "weight-formats.md",
            "papers.md",
            "api-grpc.md",
            "api-http.md",
            "deploy.md",
            "dialect-differences.md",
        )
    ),
)
_BLOCK = re.compile(r"(<!-- ([\w -]+): begin -->\n)(.*?)(<!-- \2: end -->)", re.DOTALL)
_AS_OF = re.compile(r"As of commit ([0-9a-f]{7,40}|HEAD)\b")
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
_COMMANDS = {
    "gpu": "make gpu-check",
    "papers": "make papers",
    "soak": "make soak",
    "amplification": "make amplification",
}


def _command(benchmark: str) -> str:
    return _COMMANDS.get(benchmark, f"make bench-{benchmark}")


class Value(NamedTuple):
    """A measured value on one device.

    `state` is `yes`, `no`, or why a value on the right side of its target does not count: `undecided`, `void` or
    `stale`. `reason` is that in words, and `by` what a goal was met through.
    """

    device: str
    text: str
    state: str
    reason: str | None = None
    by: str | None = None

    def __str__(self) -> str:
        value = f"**{self.text}**" if self.state == "no" else self.text
        return f"{value} ({'; '.join(filter(None, (self.device, self.by, self.reason)))})"


class Line(NamedTuple):
    """A target and its measured values.

    `met` is `no` if a value misses it, `yes` if others meet it, else the state of the first, or `not measured`.
    `headline` is usually empty.
    """

    benchmark: str
    words: str
    headline: str
    values: tuple[Value, ...]
    target: str

    @property
    def met(self) -> str:
        states = [one.state for one in self.values]
        return next((one for one in ("no", "yes") if one in states), states[0] if states else NOT_MEASURED)

    @property
    def shown_values(self) -> str:
        """The values with their devices; those that miss the target are bold."""
        return ", ".join(map(str, self.values)) or "-"


Behind = Callable[[str | None, Sequence[str]], int | None]


class Pages:
    """The blocks of pages, from the targets and a folder of results. Links begin at the root of the repository."""

    def __init__(
        self, results: Path = RESULTS, images: Path = IMAGES, as_of: str = "HEAD", behind: Behind | None = None
    ) -> None:
        """`behind` counts commits that changed some code since a commit, as of the commit `as_of` by default."""
        self.as_of = as_of
        self._folder = results
        self._behind = cache(behind or partial(commits_behind, at=as_of))
        self._targets = targets()
        self._images = images
        self._results = {name: results_of(name, results) for name in self._targets}

    def block(self, name: str) -> str:
        """Return the text of a block. Raises KeyError for an unknown name."""
        if name.startswith("picture "):
            return self._picture(name.removeprefix("picture "))
        blocks = {"performance": self._table, "headlines": self._headlines}
        blocks |= {"fields of gRPC": tables.grpc_table, "fields of HTTP": tables.http_table}
        blocks |= {"members without effect": tables.policy_table}
        blocks["requirements"] = tables.requirements_table
        blocks |= {"classes": self._classes, "worked examples": worked_examples.markdown, "formats": self._formats}
        blocks |= {"published": lambda: published.table(self._results["formats"])}
        blocks |= {"counts of types": model_types.counts, "served types": model_types.served}
        blocks["dialect differences"] = lambda: dialects_page.table(self._results["dialects"])
        blocks |= {"refused types": model_types.refused, "other types": model_types.others}
        return {**blocks, "papers": page.table, "papers pictures": page.pictures}[name]()

    def lines(self) -> Iterator[Line]:
        """Yield every target, in the order of the file."""
        for benchmark, group in self._targets.items():
            found = self._results[benchmark].items()
            runs = {device: partial(self._run, device, result) for device, result in found}
            rows = {device: {row["metric"]: row for row in result["rows"]} for device, result in found}
            for metric, target in group.items():
                if metric != "title":
                    by_device = {device: of_device.get(metric, {}) for device, of_device in rows.items()}
                    yield _line(benchmark, target, by_device, runs)

    def commits(self) -> set[str]:
        """Return the commits of all rows."""
        found = [result for results in self._results.values() for result in results.values()]
        return {str(row.get("commit", result["commit"])) for result in found for row in result["rows"]}

    def _run(self, device: str, result: Mapping[str, Any], row: Mapping[str, Any]) -> Run:
        """Return what voids a row of a result now. Rows of one file may come from several commits."""
        commit = row.get("commit", result["commit"])
        return Run(
            commit,
            result.get("repetitions", 1),
            result.get("foreign_cores"),
            self._behind(commit, tuple(code_of(row))),
            result["hardware"].get("cpu") != self._newest_cpu(device),
        )

    def _newest_cpu(self, device: str) -> str | None:
        of_device = [result for found in self._results.values() if (result := found.get(device))]
        newest: str | None = max(of_device, key=lambda result: result.get("started", ""))["hardware"].get("cpu")
        return newest

    def _headlines(self) -> str:
        rows = [
            f"| {line.headline} | {line.shown_values} | {line.target} | {_shown_met(line)} | {self._source(line)} |"
            for line in self.lines()
            if line.headline
        ]
        head = ["| what | measured | target (peer) | met | from |", "|---|---|---|---|---|"]
        return "\n".join([*head, *rows, "", f"As of commit {self.as_of}."])

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
        others = ", ".join(f"{counts[state]} {state}" for state in ("undecided", "void", "stale", NOT_MEASURED))
        return (
            f"As of commit {self.as_of}, of {counts.total()} targets {counts['yes']} are met, {counts['no']} missed,"
            f" {others}."
        )

    def _source(self, line: Line) -> str:
        """Return links to the results that a line has values from; to all of its benchmark's if it has none."""
        name = line.benchmark
        devices = [value.device for value in line.values] or self._results[name]
        links = [f"[{device}](bench/results/{path_of(name, device, Path())})" for device in devices]
        return ", ".join(links) or f"`{_command(name)}`"

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
        ages = "; on ".join(f"{device} at {age}" for device, age in self._ages(benchmark))
        measured = f" (Measured on {ages}. As of commit {self.as_of}.)" if ages else ""
        return f"![{seen}](docs/images/{path.name}){measured}"

    def _ages(self, benchmark: str) -> Iterator[tuple[str, str]]:
        """Yield the device and the age of each result of a benchmark."""
        for device, result in results_of(benchmark, self._folder).items():
            first: Mapping[str, Any] = next(iter(result["rows"]), {})
            behind = self._behind(result["commit"], tuple(code_of(first)))
            age = "an unknown commit" if behind is None else f"{behind} commits behind" if behind else "up to date"
            yield device, f"commit {result['commit']}, {age}"


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


def _line(
    benchmark: str,
    target: Mapping[str, Any],
    rows: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, Callable[[Mapping[str, Any]], Run]],
) -> Line:
    """Make the line of a target from its rows by device, and from what is known about the run of a row."""
    measured = {device: row for device, row in rows.items() if row.get("value") is not None}
    one: Mapping[str, Any] = next(iter([*measured.values(), *rows.values()]), {})
    unit, peer = one.get("unit", "ratio"), one.get("peer")
    wanted = f"{_SIDES[target['better']]} {_shown(target['target'], unit)}" + (
        f" ({peer.replace('_', ' ')})" if peer else ""
    )
    values = tuple(_value(device, row, target, runs[device](row), unit) for device, row in measured.items())
    return Line(benchmark, target["words"], target.get("headline", ""), values, wanted)


def _value(device: str, row: Mapping[str, Any], target: Mapping[str, Any], run: Run, unit: str) -> Value:
    exact = row.get("exact") or row.get("kind") in ("simulated", "arithmetic")
    found = verdict(row["value"], target, run, null=row.get("null"), limit=row.get("limit", False), exact=exact)
    missed = not MEETS[target["better"]](row["value"], target["target"])
    state = "yes" if found.met else "no" if missed else (found.reason or "").partition(":")[0]
    return Value(device, _shown(row["value"], unit), state, found.reason, row.get("by"))


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


def _as_of(text: str) -> str | None:
    """Return the commit that a page names, as of which its results are stale or not."""
    found = _AS_OF.search(text)
    return found and found[1]


def _hides(as_of: str, commits: set[str]) -> str | None:
    """Return why a page may hide stale results: it must be of this history, and not older than a result."""
    if not is_ancestor(as_of, "HEAD"):
        return f"it is as of {as_of}, which is not in the history"
    if newer := sorted(one for one in commits if is_ancestor(one, "HEAD") and not is_ancestor(one, as_of)):
        return f"it is as of {as_of}, before the results of {newer[0]}"
    return None


def _wrong(path: Path) -> str | None:
    """Return what is wrong with a page."""
    text = path.read_text()
    as_of = _as_of(text) or "HEAD"
    pages = Pages(as_of=as_of)
    if as_of != "HEAD" and (reason := _hides(as_of, pages.commits())):
        return reason
    return None if filled(path, pages) == text else "it differs from the results"


def _rewrite(path: Path) -> None:
    """Write a page as of now, unless nothing but the commit would change and the page's is not older than a result."""
    text, head = path.read_text(), output_of(["git", "rev-parse", "--short=8", "HEAD"], ROOT) or "HEAD"
    pages, before = Pages(as_of=head), _as_of(text)
    new = filled(path, pages)
    if _AS_OF.sub("", new) != _AS_OF.sub("", text) or (before and _hides(before, pages.commits())):
        path.write_text(new)


def main(check: bool) -> int:
    """Write the pages, or only report wrong ones; return the exit status."""
    if not has_history():
        print("Without the history of the repository, no page can be compared with the results.", file=sys.stderr)
        return int(not check)
    if not check:
        for path in PAGES:
            _rewrite(path)
        return 0
    wrong = {path: reason for path in PAGES if (reason := _wrong(path))}
    for path, reason in wrong.items():
        print(f"{path.relative_to(ROOT)}: {reason}. Run make readme.", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m bench.report.readme", description="Write measured figures into the pages.")
    parser.add_argument("--check", action="store_true", help="only report pages that differ, and hidden stale results")
    sys.exit(main(parser.parse_args().check))
