"""Figures 12, 14, 16 and 17 of the PagedAttention paper: normalized latency over the rate of requests.

Each case is one curve: one system in one panel.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.papers.case import Case, Values
from bench.papers.figure import Figure
from bench.papers.rows import Kind, PaperRow, paper_row, paper_value
from bench.papers.servers import COLORS, NAMES, OPT_13B, OPT_66B, OPT_175B, Server
from bench.papers.simulation.capacity import LATENCY_LIMIT, measure_capacity
from bench.papers.simulation.scenario import FASTER_TRANSFORMER, ORCAS, PAGED, SYSTEMS
from bench.papers.simulation.shared_prefix_alone import alone
from bench.papers.simulation.traces import FILES
from bench.report.picture import GREY

# A quick run has these panels only, of short traces, in which capacities are higher: queues have no time to grow.
_QUICK = {"figure_12_a": 100.0, "figure_16_five_shot": 20.0, "figure_17_text": 100.0}
_HALVINGS, _HALVINGS_OF_MANY = 3, 2  # many: runs of 10,000 requests and more
_SHORTER = 120.0  # seconds of figure 14, whose traces have 450 to 3,500 requests of two to six sequences


class Panel(NamedTuple):
    """One panel: a workload on a server, served by systems whose searches begin at `starts` requests a second.

    `own` are fields of a Scenario that only some systems have.
    """

    name: str
    title: str
    server: Server
    starts: Mapping[str, float]
    workload: Mapping[str, Any]
    halvings: int = _HALVINGS
    own: Mapping[str, Mapping[str, Any]] = {}

    def case(self, figure: str, system: str, *, quick: bool) -> Case:
        """Return the case of a system's curve."""
        more = {"seconds": _QUICK[f"{figure}_{self.name}"]} if quick else {}
        arguments = {
            "start": self.starts[system],
            "halvings": 1 if quick else self.halvings,
            "system": system,
            **self.server.scenario(),
            **self.workload,
            **self.own.get(system, {}),
            **more,
        }
        files = (FILES[arguments["workload"]],)
        return Case(f"{figure}_{self.name}_{system}", measure_capacity, arguments, files=files)


def _starts(paged: float, oracle: float, pow2: float, longest: float, static: float) -> dict[str, float]:
    return dict(zip(SYSTEMS, (paged, oracle, pow2, longest, static), strict=True))


_SHAREGPT, _ALPACA = {"workload": "sharegpt"}, {"workload": "alpaca"}
# Searches begin near the rates that are sustained, to be short. Where they begin decides which rates are tried, but not
# which are sustained: a capacity is known to 3 % (three halvings) or 7 % (two), in a quick run to 14 %.
FIGURE_12 = (
    Panel("a", "OPT-13B, 1 GPU, ShareGPT", OPT_13B, _starts(2.2, 1.0, 0.85, 0.65, 0.2), _SHAREGPT),
    Panel("b", "OPT-66B, 4 GPUs, ShareGPT", OPT_66B, _starts(0.9, 0.42, 0.33, 0.23, 0.08), _SHAREGPT),
    Panel("c", "OPT-175B, 8 GPUs, ShareGPT", OPT_175B, _starts(4.0, 2.6, 2.1, 1.7, 0.2), _SHAREGPT),
    Panel("d", "OPT-13B, 1 GPU, Alpaca", OPT_13B, _starts(43, 33, 21, 3.8, 1.0), _ALPACA, _HALVINGS_OF_MANY),
    Panel("e", "OPT-66B, 4 GPUs, Alpaca", OPT_66B, _starts(22, 13, 8.4, 1.3, 0.4), _ALPACA, _HALVINGS_OF_MANY),
    Panel("f", "OPT-175B, 8 GPUs, Alpaca", OPT_175B, _starts(50, 27, 27, 12.5, 0.7), _ALPACA, _HALVINGS_OF_MANY),
)


def _sequences(kind: str, number: int, paged: float, oracle: float, **more: float) -> Panel:
    title = f"{number} {kind}, OPT-13B, Alpaca"
    workload = {**_ALPACA, kind: number, "preemption": "swap", "seconds": _SHORTER}
    return Panel(f"{kind}_{number}", title, OPT_13B, {PAGED: paged, "oracle": oracle, **more}, workload, 2)


FIGURE_14 = (
    _sequences("samples", 2, 29, 17, pow2=13, max=2.0),
    _sequences("samples", 4, 15, 9.5, pow2=6.5, max=0.65),
    _sequences("samples", 6, 11, 7.0, pow2=4.3, max=0.6),
    _sequences("beams", 2, 29, 13.5),
    _sequences("beams", 4, 17, 6.3),
    _sequences("beams", 6, 12.5, 3.9),
)


def _translation(name: str, title: str, prefix: int, paged: float, oracle: float) -> Panel:
    workload = {"workload": "translation", "prefix_tokens": prefix}
    return Panel(name, title, OPT_13B, {PAGED: paged, "oracle": oracle}, workload, _HALVINGS_OF_MANY)


FIGURE_16 = (
    _translation("one_shot", "1 example, 80 tokens", 80, 42, 21),
    _translation("five_shot", "5 examples, 341 tokens", 341, 29, 8.2),
)
_CHAT_STARTS = {PAGED: 0.8, "oracle": 0.5, "pow2": 0.47, "max": 0.45}
# Of the artifact: a request begins a new conversation with this probability.
_TURNS = {PAGED: {"workload": "chat_turns_half_new"}}
FIGURE_17 = (
    Panel("text", "The text: any moment of a chat", OPT_13B, _CHAT_STARTS, {"workload": "chat"}),
    Panel(
        "artifact",
        "The artifact: turn by turn",
        OPT_13B,
        _CHAT_STARTS,
        {"workload": "chat_turns_tenth_new"},
        own=_TURNS,
    ),
    Panel("all_1024", "All prompts of 1,024 tokens", OPT_13B, _CHAT_STARTS, {"workload": "chat_of_1024"}),
)


def _make(
    name: str,
    title: str,
    panels: Sequence[Panel],
    rows: Any,
    inches: tuple[float, float],
    seen: str,
    others: Callable[[bool], list[Case]] = lambda _: [],
) -> Figure:
    columns = min(3, len(panels))

    def cases(quick: bool) -> list[Case]:
        chosen = [panel for panel in panels if not quick or f"{name}_{panel.name}" in _QUICK]
        return [*(panel.case(name, system, quick=quick) for panel in chosen for system in panel.starts), *others(quick)]

    def draw(axes: Sequence[Any], values: Mapping[str, Values]) -> None:
        for one, panel in zip(axes, panels, strict=False):
            if panel in _computed(name, panels, values):
                _draw_panel(one, name, panel, values)
            else:
                one.set_visible(False)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)

    shape = (-(-len(panels) // columns), columns)
    return Figure(name, title, cases, rows, draw, shape, inches, seen, of_capacities=True)


def _computed(figure: str, panels: Sequence[Panel], values: Mapping[str, Values]) -> list[Panel]:
    return [panel for panel in panels if all(f"{figure}_{panel.name}_{system}" in values for system in panel.starts)]


def _capacity(figure: str, panel: Panel, system: str, values: Mapping[str, Values]) -> float:
    capacity: float = values[f"{figure}_{panel.name}_{system}"]["capacity"]
    return capacity


def _ratio(figure: str, panel: Panel, system: str, values: Mapping[str, Values]) -> float:
    return _capacity(figure, panel, PAGED, values) / _capacity(figure, panel, system, values)


def _row(figure: str, metric: str, value: float, unit: str = "ratio") -> PaperRow:
    return paper_row(figure, metric, round(value, 4), unit, Kind.SIMULATED)


def _capacities(figure: str, panels: Sequence[Panel], values: Mapping[str, Values]) -> list[PaperRow]:
    return [
        _row(figure, f"{panel.name}_{system}_capacity", _capacity(figure, panel, system, values), "requests/s")
        for panel in _computed(figure, panels, values)
        for system in panel.starts
    ]


def outside(value: float, low: float, high: float) -> float:
    """Return how far a value is outside a range, relative to the range's nearer end; 0 within it."""
    return max(0.0, 1 - value / low, value / high - 1)


# Ratios of sustained rates over Orca (Oracle) and Orca (Max). The paper's text has a range for ShareGPT. Those of
# Alpaca are of the rates at which its panels d and e still hold.
_SHAREGPT_RATIOS = {"oracle": (1.7, 2.7), "max": (2.7, 8.0)}
RATIOS_12 = {
    **dict.fromkeys("abc", _SHAREGPT_RATIOS),
    "d": {"oracle": (31.5 / 24, 31.5 / 24), "max": (31.5 / 5, 31.5 / 5)},
    "e": {"oracle": (20 / 12, 20 / 12), "max": (20 / 0.25, 20 / 0.25)},
}


def _rows_12(values: Mapping[str, Values]) -> list[PaperRow]:
    rows = _capacities("figure_12", FIGURE_12, values)
    for panel in _computed("figure_12", FIGURE_12, values):
        for system in (*ORCAS, FASTER_TRANSFORMER):
            ratio = _ratio("figure_12", panel, system, values)
            rows.append(_row("figure_12", f"{panel.name}_paged_over_{system}", ratio))
            if bounds := RATIOS_12.get(panel.name, {}).get(system):
                metric = f"{panel.name}_paged_over_{system}_distance"
                rows.append(_row("figure_12", metric, outside(ratio, *bounds)))
    speeds = [speed for system in SYSTEMS for speed in values[f"figure_12_a_{system}"]["speeds"]]
    rows.append(_row("figure_12", "a_slowest_simulated_over_cpu_seconds", min(speeds)))
    return rows


def _off(figure: str, metric: str, value: float) -> list[PaperRow]:
    """Return the row of a ratio, and the row of its relative distance from the paper's, if that has one."""
    row, paper = _row(figure, metric, value), paper_value(figure, metric)
    return [row] if paper is None else [row, _row(figure, f"{metric}_distance", abs(value / paper - 1))]


def _rows_14(values: Mapping[str, Values]) -> list[PaperRow]:
    rows = _capacities("figure_14", FIGURE_14, values)
    basic = next(panel for panel in FIGURE_12 if panel.name == "d")
    if f"figure_12_{basic.name}_{PAGED}" in values:
        rows += _off("figure_14", "basic_paged_over_oracle", _ratio("figure_12", basic, "oracle", values))
    for panel in _computed("figure_14", FIGURE_14, values):
        rows += _off("figure_14", f"{panel.name}_paged_over_oracle", _ratio("figure_14", panel, "oracle", values))
    return rows


def _rows_16(values: Mapping[str, Values]) -> list[PaperRow]:
    """Capacities and ratios, ours and those computed without Quire; the distance is that from the nearer reference."""
    rows = _capacities("figure_16", FIGURE_16, values)
    for panel in _computed("figure_16", FIGURE_16, values):
        metric, ratio = f"{panel.name}_paged_over_oracle", _ratio("figure_16", panel, "oracle", values)
        alone_rates = values[f"figure_16_{panel.name}_alone"]
        alone_ratio = alone_rates[PAGED] / alone_rates["oracle"]
        paper = paper_value("figure_16", metric)
        assert paper, f"the paper has {metric}"
        distances = {"papers": abs(ratio / paper - 1), "alone": abs(ratio / alone_ratio - 1)}
        for system, rate in alone_rates.items():
            rows.append(_row("figure_16", f"{panel.name}_{system}_alone_capacity", rate, "requests/s"))
        rows += [
            _row("figure_16", metric, ratio),
            _row("figure_16", f"{panel.name}_alone_paged_over_oracle", alone_ratio),
        ]
        rows += [_row("figure_16", f"{panel.name}_from_{one}_distance", far) for one, far in distances.items()]
        rows.append(_row("figure_16", f"{panel.name}_distance", min(distances.values())))
    return rows


def _alone_16(quick: bool) -> list[Case]:
    """The cases of figure 16 without Quire."""
    cases = []
    for panel in FIGURE_16:
        if not quick or f"figure_16_{panel.name}" in _QUICK:
            prefix = panel.workload["prefix_tokens"]
            arguments = {"prefix": prefix, "ended": 400 if quick else 4000, **panel.server.scenario()}
            case = Case(f"figure_16_{panel.name}_alone", alone, arguments, files=(FILES["translation"],))
            cases.append(case)
    return cases


def _rows_17(values: Mapping[str, Values]) -> list[PaperRow]:
    rows = _capacities("figure_17", FIGURE_17, values)
    for panel in _computed("figure_17", FIGURE_17, values):
        for system in ORCAS:
            metric = f"{panel.name}_paged_over_{system}"
            rows += _off("figure_17", metric, _ratio("figure_17", panel, system, values))
        for system in panel.starts:
            share = values[f"figure_17_{panel.name}_{system}"]["prompts_share"]
            rows.append(_row("figure_17", f"{panel.name}_{system}_prompts_of_time", share, "share"))
    return rows


def _draw_panel(axes: Any, figure: str, panel: Panel, values: Mapping[str, Values]) -> None:
    """Draw a curve for each system. On the limit, dots mark our sustained rates and triangles the paper's."""
    for system in panel.starts:
        axes.plot([_capacity(figure, panel, system, values)], [LATENCY_LIMIT], "o", color=COLORS[system], markersize=6)
        points = [
            (rate, latency) for rate, latency, cut in values[f"{figure}_{panel.name}_{system}"]["points"] if not cut
        ]
        axes.plot(*zip(*points, strict=True), ".-", color=COLORS[system], label=NAMES[system], linewidth=1.2)
        if (paper := paper_value(figure, f"{panel.name}_{system}_capacity")) is not None:
            axes.plot([paper], [LATENCY_LIMIT], "v", color=COLORS[system], markersize=7, mec="black", mew=0.6)
    axes.axhline(LATENCY_LIMIT, color=GREY, linestyle=":", linewidth=1)
    axes.set_ylim(0, 1.15 * LATENCY_LIMIT)
    axes.set_xlim(left=0)
    axes.set_title(f"({panel.name}) {panel.title}" if len(panel.name) == 1 else panel.title)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("normalized latency (s/token)")


FIGURES = (
    _make(
        "figure_12",
        "Figure 12: single sequences, simulated (on the dotted limit: dots ours, triangles the paper's rates)",
        FIGURE_12,
        _rows_12,
        (11, 6.4),
        "Six panels of normalized latency over the rate: Quire sustains higher rates than all three Orcas",
    ),
    _make(
        "figure_14",
        "Figure 14: parallel sampling and beam search, simulated (dots on the dotted limit: sustained rates)",
        FIGURE_14,
        _rows_14,
        (11, 6.4),
        "Six panels of normalized latency over the rate, for 2, 4 and 6 samples and beams",
    ),
    _make(
        "figure_16",
        "Figure 16: translation with a shared prefix, simulated",
        FIGURE_16,
        _rows_16,
        (8, 3.2),
        "Two panels of normalized latency over the rate, with prefixes of 80 and 341 tokens",
        _alone_16,
    ),
    _make(
        "figure_17",
        "Figure 17: chat, simulated (dots on the dotted limit: sustained rates)",
        FIGURE_17,
        _rows_17,
        (11, 3.4),
        "Three panels of normalized latency over the rate of chats, for Quire and three Orcas",
    ),
)
