"""The figure of the soak: what each process holds over the time."""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from bench.report.picture import GREY, OTHER, PEER, QUIRE, TARGET, Picture, Result

_COLOURS = {"gateway-a": QUIRE, "gateway-b": OTHER, "engine-a": PEER, "engine-b": TARGET, "kvmanager": GREY}


def _soak(panels: Sequence[Any], result: Result) -> None:
    """Memory against its median, file descriptors and series of each incarnation; at rest, a dot."""
    memory, descriptors, series = panels
    apart: list[float] = []
    for name, columns in result["samples"].items():
        process, _, number = name.partition(" ")
        style = {"color": _COLOURS[process], "label": process if number == "1" else None}
        minutes = [seconds / 60 for seconds in columns["seconds"]]
        resting = [place for place, rest in enumerate(columns["resting"]) if rest]
        middle = median(columns["anonymous_mib"])
        memory.plot(minutes, [one - middle for one in columns["anonymous_mib"]], linewidth=1.3, **style)
        apart += [abs(one - middle) for one in columns["anonymous_mib"]]
        for axes, column in ((descriptors, "file_descriptors"), (series, "series")):
            axes.plot(minutes, columns[column], linewidth=0.8, **style)
            axes.plot([minutes[at] for at in resting], [columns[column][at] for at in resting], "o", **_dot(style))
    memory.set_title("Allocated memory, against each process's median")
    memory.set_ylabel("MiB; starts of processes are cut off")
    memory.set_ylim(*(side * max(4.0, 1.5 * quantiles(apart, n=20)[-2]) for side in (-1, 1)))
    descriptors.set_title("Open file descriptors; at rest, a dot")
    series.set_title("Series of metrics; at rest, a dot")
    for axes in panels:
        axes.set_xlabel("minutes; a line begins anew after a kill")
        axes.set_ylim(top=axes.get_ylim()[1] + 0.35 * (axes.get_ylim()[1] - axes.get_ylim()[0]))
        axes.legend(loc="upper left", ncols=3, fontsize=8)


def _dot(style: dict[str, Any]) -> dict[str, Any]:
    return {"color": style["color"], "markersize": 3.5}


PICTURES = {
    "soak": Picture(
        _soak,
        3,
        (13, 3.8),
        "A soak under mixed load, with kills of clients and services",
        "Lines of allocated memory, open file descriptors and series of metrics of five processes over the minutes",
    ),
}
