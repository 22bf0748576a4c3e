"""How pictures look. Needs nothing to be imported."""

from typing import Any

# Okabe and Ito's colours, which people who see few colours tell apart.
BLUE, ORANGE, SKY, RED, GREY = "#0072B2", "#E69F00", "#56B4E9", "#D55E00", "#9A9A9A"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
}
