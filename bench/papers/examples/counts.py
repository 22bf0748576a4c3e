"""The numbers of blocks that the paper and the texts work out, and the core's."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from bench.papers.examples import block_counts, decoding, sharing
from bench.papers.rows import Kind, PaperRow, paper_row, paper_value

FIGURE = "worked_examples"


class Count(NamedTuple):
    """A number of blocks (or of `unit`), `alone` for the same sequences without sharing. `source` gives the text."""

    metric: str
    words: str
    value: int
    alone: int | None = None
    source: str = ""
    unit: str = "blocks"

    def rows(self) -> Iterator[PaperRow]:
        """Yield the row of the value, and that without sharing as `METRIC_alone`."""
        yield paper_row(FIGURE, self.metric, self.value, self.unit, Kind.ARITHMETIC)
        if self.alone is not None:
            yield paper_row(FIGURE, f"{self.metric}_alone", self.alone, self.unit, Kind.ARITHMETIC)

    def cells(self) -> list[str]:
        """Return the cells of the table of counts."""
        said = (paper_value(FIGURE, self.metric), paper_value(FIGURE, f"{self.metric}_alone"))
        values = " and ".join(_shown(value) for value in said if value is not None)
        text = ": ".join(part for part in (self.source, values) if part)
        return [self.words, _shown(self.value), "" if self.alone is None else _shown(self.alone), text]


@cache
def counts() -> tuple[Count, ...]:
    """Return all counts, in the order of the table."""
    return (*_of_figures(), *_of_texts())


def _of_figures() -> Iterator[Count]:
    one = decoding.one_request()
    yield Count("prompt", "one request: prompt of 7 tokens", one[0].state.counts.held, None, "Figure 6")
    yield Count("decoded", "one request: 9 tokens", one[2].state.counts.held, None, "Figure 6")
    samples, beams = sharing.two_samples()[-1].state, sharing.beam_search()
    yield _shared("samples", "two samples of 8 tokens", samples.counts.held, [8, 8], "Figure 8")
    yield _shared("beams_before", "four beams of 16 tokens", beams.before.counts.held, [16] * 4, "Figure 9")
    yield _shared("beams_after", "the beams one step later", beams.after.counts.held, [17] * 4, "Figure 9")
    prefix = sharing.shared_prefix().state
    lengths = [sum(prefix.filled(name)) for name in prefix.tables]
    yield _shared("prefix", "two translations behind a prefix", prefix.counts.held, lengths)


def _shared(metric: str, words: str, value: int, lengths: list[int], source: str = "") -> Count:
    return Count(metric, words, value, block_counts.alone(lengths, decoding.BLOCK_SIZE), source)


def _of_texts() -> Iterator[Count]:
    """Yield the counts of the texts; their blocks have 16 tokens."""
    for generated, source in ((10, "lesson"), (17, "")):
        shared, apart = block_counts.beams(64, generated, 4), block_counts.alone([64 + generated] * 4)
        words = f"four beams: 64 tokens of prompt, {generated} each"
        yield Count(f"beams_64_and_{generated}", words, shared, apart, source)
    shared, apart = block_counts.beams(256, 0, 4), block_counts.alone([256] * 4)
    yield Count("beams_256", "four beams: 256 tokens of prompt", shared, apart, "lesson")
    shared, apart = block_counts.shared_prefix(4_096, 4), block_counts.alone([4_096] * 4)
    yield Count(
        "system_prompt", "4,096 tokens of system prompt, four users", shared, apart, "lesson: 2 and 8 GB, 8 MiB a block"
    )
    yield Count("short_answer", "80 tokens", block_counts.alone([80]), None, "lesson: 2,048 slots reserved")
    yield Count("table", "2,048 tokens", block_counts.alone([block_counts.LONGEST]), None, "lesson")
    yield Count("table_of_size_1", "16k tokens, blocks of 1", block_counts.alone([16_384], 1), None, "lesson: 16k")
    fitting = block_counts.full_length_requests(12 * 10**9)
    source = "article: a handful"
    yield Count("full_length", "OPT-13B: requests of 2,048 tokens in 12 GB", fitting, None, source, "requests")


def _shown(value: float) -> str:
    return f"{value:,.0f}"
