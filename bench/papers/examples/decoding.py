"""One request and two requests, decoded token by token: Figures 3, 5, 6 and 7 of the PagedAttention paper."""

from typing import NamedTuple

from bench.papers.examples.word_pool import Snapshot, WordPool

BLOCK_SIZE = 4
PROMPT = "Four score and seven years ago our"
_OTHER_PROMPT = "It was the best of"
_OUTPUT = ("fathers", "brought", "forth", "upon this continent a new nation")


class Moment(NamedTuple):
    """A state of an example, and the words that led to it."""

    event: str
    state: Snapshot


def one_request() -> list[Moment]:
    """Decode "Four score and seven ..." up to 16 tokens, then free it (Figures 5 and 6, and the text's Figure 4).

    The pool hands out blocks 7, 1 and 3 first, as the paper's does.
    """
    pool = WordPool(8, BLOCK_SIZE, (7, 1, 3))
    pool.begin("A", PROMPT.split())
    moments = [Moment(PROMPT, pool.snapshot())]
    for words in _OUTPUT:
        pool.advance({"A": words.split()})
        moments.append(Moment(words, pool.snapshot()))
    pool.free("A")
    return [*moments, Moment("(released)", pool.snapshot())]


def two_requests() -> Snapshot:
    """Decode two requests that take blocks in turn (Figure 7)."""
    pool = WordPool(8, BLOCK_SIZE, (7, 1, 5, 2, 3))
    pool.begin("A", PROMPT.split())
    pool.begin("B", _OTHER_PROMPT.split())
    for step in ({"A": ["fathers"], "B": ["times"]}, {"A": ["brought"]}):
        pool.advance(step)
    return pool.snapshot()


def unused_slots(tokens: int) -> int:
    """Return how many slots a request of `tokens` tokens holds and does not fill (Figure 3's requests, paged)."""
    pool = WordPool(8, BLOCK_SIZE)
    pool.begin("A", [str(position) for position in range(tokens)])
    return pool.held * BLOCK_SIZE - sum(pool.snapshot().filled("A"))
