"""Parallel samples, beams and a shared prefix: Figures 8, 9 and 10 of the PagedAttention paper."""

from typing import NamedTuple

from bench.papers.examples.decoding import BLOCK_SIZE, PROMPT, Moment
from bench.papers.examples.word_pool import Snapshot, WordPool

_PREFIX = (
    "Translate English to French: sea otter => loutre de mer peppermint => menthe poivrée"
    " plush girafe => girafe en peluche"
)
_TASKS = {"A": "cheese =>", "B": "I love you =>"}
_ANSWERS = {"A": ["fromage"], "B": ["je", "t'aime"]}


def two_samples(prompt: str = PROMPT, order: tuple[str, str] = ("A1", "A2")) -> list[Moment]:
    """Sample two outputs of one prompt, which write in `order` (Figure 8)."""
    pool = WordPool(8, BLOCK_SIZE, (7, 1, 3))
    pool.begin("A1", prompt.split())
    pool.fork("A1", "A2")
    moments = [Moment("after the fork", pool.snapshot())]
    for name, word in zip(order, ("fathers", "mothers"), strict=True):
        pool.advance({name: [word]})
        moments.append(Moment(f"{name} writes {word}", pool.snapshot()))
    return moments


class BeamStep(NamedTuple):
    """A pool before and after one step of beam search."""

    before: Snapshot
    after: Snapshot

    @property
    def released(self) -> list[int]:
        """The blocks whose reference count reached 0."""
        return [one for one, block in self.before.pool.items() if block.references and not self._references(one)]

    @property
    def granted(self) -> list[int]:
        """The blocks that have left reference count 0."""
        return [one for one, block in self.before.pool.items() if self._references(one) and not block.references]

    def _references(self, block: int) -> int:
        return self.after.pool[block].references


def beam_search() -> BeamStep:
    """Four candidates of 16 tokens, of which candidates 1 and 2 continue as two each (Figure 9).

    Those are called 1, 1', 2 and 2' afterwards. One Step forks, frees and extends. The pool hands out block 13 first,
    for the paper's block 0, because block 0 of a pool has no owner.
    """
    pool = _four_candidates()
    before = pool.snapshot()
    words = {name: [f"next {name}"] for name in ("1", "1'", "2", "2'")}
    pool.advance(words, forks=[("1", "1'"), ("2", "2'")], pruned=("0", "3"))
    return BeamStep(before, pool.snapshot())


def _four_candidates() -> WordPool:
    """Candidate 3 leaves the others after one block, candidates 0 to 2 part after three."""
    pool = WordPool(13, BLOCK_SIZE, (13,))
    pool.begin("0", ["the", "prompt", "of", "beams"])
    pool.fork("0", "3")
    for block in range(1, 3):
        pool.advance({name: _block_of(name, block) for name in ("0", "3")})
    pool.fork("0", "1", "2")
    pool.advance({name: _block_of(name, 3) for name in ("0", "1", "2", "3")})
    return pool


def _block_of(name: str, block: int) -> list[str]:
    return [f"{name}.{block}.{slot}" for slot in range(BLOCK_SIZE)]


class SharedPrefix(NamedTuple):
    """Two translations behind one pinned prefix: the pool at their ends, and tokens of their prompts."""

    state: Snapshot
    cached_tokens: int
    prompt_tokens: int


def shared_prefix() -> SharedPrefix:
    """Compute and pin the instructions and examples of Figure 10, then translate twice behind them."""
    pool = WordPool(12, BLOCK_SIZE)
    pool.begin("prefix", _PREFIX.split())
    pool.pin("prefix")
    pool.free("prefix")
    prompts = {name: f"{_PREFIX} {task}".split() for name, task in _TASKS.items()}
    cached = sum(pool.begin(name, prompt) for name, prompt in prompts.items())
    pool.advance(_ANSWERS)
    return SharedPrefix(pool.snapshot(), cached, sum(map(len, prompts.values())))
