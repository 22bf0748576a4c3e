"""One module for each group of figures: its cases, its rows and its picture."""

from bench.papers.figure import Figure


def all_figures() -> tuple[Figure, ...]:
    """Return the figures of both papers, in their order."""
    from bench.papers.figures import block_sizes, memory, throughput

    return (*memory.FIGURES, *throughput.FIGURES, *block_sizes.FIGURES)
