"""The style of plots. Imports no plotting library."""

from typing import Any

# After Okabe and Ito, for colour blind readers. Their lightness differs too (CIE L* 32, 66, 86, 50, 46), for grey
# prints.
BLUE, ORANGE, SKY, RED, GREY = "#00507F", "#E08E00", "#B5DDF5", "#C44E00", "#6E6E6E"
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
