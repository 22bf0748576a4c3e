"""Draws the results of benchmarks: `python -m bench.report.pictures NAME...`, or all with a picture.

A picture has a row of panels for each class of CPUs with a result. It is redrawn whenever a result is written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import figures_of_blocks, figures_of_engine, figures_of_serving, figures_of_soak
from bench.report.targets import RESULTS, ROOT, results_of
from services.loadgen.report.drawing import STYLE

IMAGES = ROOT / "docs" / "images"
PICTURES = (
    figures_of_engine.PICTURES | figures_of_serving.PICTURES | figures_of_blocks.PICTURES | figures_of_soak.PICTURES
)


def draw(benchmark: str, results: Path = RESULTS, images: Path = IMAGES) -> Path | None:
    """Draw a benchmark's results; return the file, None if it has no picture."""
    found = results_of(benchmark, results)
    if benchmark not in PICTURES or not found:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    picture = PICTURES[benchmark]
    width, height = picture.inches
    with mpl.rc_context(STYLE):
        figure = pyplot.figure(figsize=(width, height * len(found)), layout="constrained")
        parts = figure.subfigures(len(found), 1, squeeze=False)[:, 0]
        for part, (device, result) in zip(parts, found.items(), strict=True):
            picture.draw(part.subplots(1, picture.panels, squeeze=False)[0], result)
            part.suptitle(f"{picture.title} ({device})", x=0.01, ha="left", fontweight="bold", fontsize=11)
        images.mkdir(parents=True, exist_ok=True)
        drawn = images / f"bench-{benchmark}.png"
        figure.savefig(drawn, dpi=130)
        pyplot.close(figure)
    return drawn


def main(names: Sequence[str]) -> None:
    """Draw the named pictures, or all."""
    for name in names or PICTURES:
        picture = draw(name)
        print(f"drawn: {picture.relative_to(ROOT)}" if picture else f"{name}: nothing to draw")


if __name__ == "__main__":
    main(sys.argv[1:])
