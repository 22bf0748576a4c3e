"""Numbers of blocks that sequences hold with and without sharing, each counted in a pool of the real core."""

from collections.abc import Sequence

from bench.papers.examples.word_pool import WordPool
from blocks import blocks_for

BLOCK_SIZE = 16  # of the texts
LONGEST = 2_048  # tokens of a sequence of OPT-13B
# 2 (key and value) x 5,120 (hidden size) x 40 (layers) x 2 (bytes of fp16)
OPT_13B_TOKEN_BYTES = 2 * 5_120 * 40 * 2


def alone(lengths: Sequence[int], block_size: int = BLOCK_SIZE) -> int:
    """Return the blocks of sequences that share nothing, each with its tokens computed."""
    pool = WordPool(sum(blocks_for(length, block_size) for length in lengths), block_size)
    for number, length in enumerate(lengths):
        pool.begin(str(number), _words("", length), salt=str(number).encode())
    return pool.held


def beams(prompt: int, generated: int, width: int) -> int:
    """Return the blocks of `width` forks of one prompt, each with `generated` tokens of its own."""
    pool = WordPool(width * blocks_for(prompt + generated, BLOCK_SIZE), BLOCK_SIZE)
    names = [str(number) for number in range(width)]
    pool.begin(names[0], _words("", prompt))
    pool.fork(*names)
    if generated:
        pool.advance({name: _words(name, generated) for name in names})
    return pool.held


def shared_prefix(prefix: int, users: int) -> int:
    """Return the blocks that hold the first `prefix` tokens of requests which differ in one token after them."""
    pool = WordPool(users * blocks_for(prefix + 1, BLOCK_SIZE), BLOCK_SIZE)
    for number in range(users):
        pool.begin(str(number), [*_words("", prefix), f"of user {number}"])
    return sum(block.references == users for block in pool.snapshot().pool.values())


def full_length_requests(memory_bytes: int) -> int:
    """Return how many requests of LONGEST tokens of OPT-13B the core admits to a pool of this size."""
    pool = WordPool(memory_bytes // (BLOCK_SIZE * OPT_13B_TOKEN_BYTES), BLOCK_SIZE)
    count = 0
    while pool.fits(LONGEST):
        count += 1
    return count


def _words(name: str, count: int) -> list[str]:
    return [f"{name} {position}" for position in range(count)]
