"""One module for each group of figures: its cases, its rows and its picture."""

from bench.papers.figure import Figure


def all_figures() -> tuple[Figure, ...]:
    """Return the figures of both papers."""
    from bench.papers import worked_examples
    from bench.papers.figures import (
        attention_kernels,
        block_sizes,
        long_contexts,
        long_scenarios,
        memory,
        recovery_costs,
        throughput,
    )

    modules = (memory, throughput, attention_kernels, block_sizes, recovery_costs, long_contexts, long_scenarios)
    return (*(figure for module in modules for figure in module.FIGURES), *worked_examples.FIGURES)
