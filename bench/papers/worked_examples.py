"""The worked examples of the PagedAttention paper and of two texts that teach it, as a block of docs/papers.md."""

from collections.abc import Iterable, Sequence
from textwrap import fill

from bench.papers.examples import decoding, drawing, sharing
from bench.papers.examples.counts import counts
from bench.papers.figure import Figure
from bench.papers.rows import PaperRow

_WIDTH = 120  # of the pages, in characters
# The labels of Figure 9 after the step, by the names that the candidates have here.
_CANDIDATES = {
    "1": "candidate 0 (from 1)",
    "1'": "candidate 1 (from 1)",
    "2": "candidate 2 (from 2)",
    "2'": "candidate 3 (from 2)",
}

_DIFFERENCES = (
    "The lesson's 12 and 16 do not follow from its block size: 10 tokens need 1 block a beam, not 2, and its 16 leaves"
    " out the blocks of generated tokens. Its 12 is right from 17 to 32 tokens each.",
    'The article\'s request "never reserves a 9th block" at 7 tokens: it holds 2 blocks, and the 9th token begins the'
    " third.",
    'The article\'s last block has "between 1 and B-1" empty slots, and a new block is "never adjacent": a last block'
    " may be full (8 tokens), and a fresh pool grants blocks 1, 2, 3.",
    "In the article's Figure 5 sample B gets the copy. So it does here if B writes first; in the paper, A1 does. Its"
    ' "both prompt tokens" in block 1 fit a prompt of 6 tokens.',
)


def rows() -> list[PaperRow]:
    """Return the rows of all counts."""
    return [row for count in counts() for row in count.rows()]


def markdown() -> str:
    """Return the block `worked examples`."""
    parts = (_one_request, _two_requests, _samples, _beams, _prefix, _counts, _differences)
    return "\n\n".join(part() for part in parts)


def _one_request() -> str:
    unused = decoding.unused_slots(10)
    text = (
        f"**One request** (Figures 3, 5 and 6): a prompt of 7 tokens, then decoding. 10 tokens leave {unused} slots"
        " empty, where Figure 3's contiguous chunk has 2,038 that are never used. Full blocks are cached when released:"
    )
    lines = [_moment(moment) for moment in decoding.one_request()]
    return _titled(text, _table(["words", "tokens", "block (filled)", "free", "cached", "held"], "l-l---", lines))


def _moment(moment: decoding.Moment) -> list[str]:
    state = moment.state
    tokens, table = (sum(state.filled("A")), drawing.entries(state.tables["A"])) if state.tables else (0, "")
    return [moment.event, str(tokens), table, *map(str, state.counts[:3])]


def _two_requests() -> str:
    text = (
        "**Two requests** (Figure 7) take blocks in turn. Request A is in the state of Figure 6. Left, each request's"
        " logical blocks and block table; right, the pool:"
    )
    return _titled(text, drawing.table_with_pool(decoding.two_requests()))


def _samples() -> str:
    text = (
        "**Parallel sampling** (Figure 8). x2 is a reference count of 2. The first sample to write into the shared"
        " block 1 gets a copy; the last holder writes in place:"
    )
    return _titled(text, drawing.moments(sharing.two_samples()))


def _beams() -> str:
    step = sharing.beam_search()
    released, granted = (", ".join(map(str, blocks)) for blocks in (step.released, step.granted))
    text = (
        "**Beam search** (Figure 9; block 13 is the paper's block 0, which in Quire has no owner). Candidates 0 and 3"
        f" are pruned, 1 and 2 forked. Blocks {released} are released, {granted} granted, {len(step.after.copies)}"
        " copied:"
    )
    return _titled(text, drawing.beams(step, _CANDIDATES))


def _prefix() -> str:
    one = sharing.shared_prefix()
    text = (
        f"**Shared prefix** (Figure 10), pinned: {one.cached_tokens} of the {one.prompt_tokens} prompt tokens are hits."
        " Only full blocks are shared; a pin counts as a reference:"
    )
    return _titled(text, drawing.moments([decoding.Moment("", one.state)]))


def _counts() -> str:
    text = (
        "**Blocks held**, and those of the same sequences without sharing. Blocks have 4 tokens in the figures, 16 in"
        " the texts:"
    )
    lines = [count.cells() for count in counts()]
    return _titled(text, _table(["sequences", "blocks", "without sharing", "the text says"], "l--l", lines))


def _differences() -> str:
    return _titled(
        "**Where the texts differ:**",
        "\n".join(fill(f"* {one}", _WIDTH, subsequent_indent="  ") for one in _DIFFERENCES),
    )


def _titled(text: str, drawn: str) -> str:
    return f"{fill(text, _WIDTH)}\n\n{drawn}"


def _table(heads: Sequence[str], alignment: str, lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a column is aligned to the left (l) or to the right (-)."""
    marks = ["---" if one == "l" else "--:" for one in alignment]
    return "\n".join([_line(heads), f"|{'|'.join(marks)}|", *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


FIGURES = (
    Figure("worked_examples", "Worked examples", lambda _: [], lambda _: rows(), lambda *_: None, (0, 0), (0, 0), ""),
)
