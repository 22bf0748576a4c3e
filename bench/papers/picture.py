"""Draws a figure into `docs/images/papers-NAME.png`."""

from collections.abc import Mapping
from pathlib import Path

from bench.papers.case import Values
from bench.papers.figure import Figure
from bench.report.pictures import IMAGES
from services.loadgen.report.drawing import STYLE


def path_of(figure: Figure, folder: Path = IMAGES) -> Path:
    """Return the file of a figure's picture."""
    return folder / f"papers-{figure.name}.png"


def draw(figure: Figure, values: Mapping[str, Values], folder: Path | None = None) -> Path:
    """Draw a figure from its values, and return the file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context(STYLE):
        drawing, axes = pyplot.subplots(*figure.panels, figsize=figure.inches, squeeze=False, layout="constrained")
        figure.draw(list(axes.flat), values)
        drawing.suptitle(figure.title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        path = path_of(figure, folder or IMAGES)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=130)
        pyplot.close(drawing)
    return path
