"""allocate: the first sequence of a group finds its prefix in the cache, in either tier, and gets its first blocks."""

from collections.abc import Sequence as Items
from typing import NamedTuple

from kvmanager import limits
from kvmanager.books import Books, Sequence
from kvmanager.errors import IdInUse, InvalidItem, OutOfBlocks
from kvmanager.keys import block_keys
from kvmanager.step import Allocate, Copy, StepItem, StepResult, TableChange


class Hit(NamedTuple):
    """A block of a prompt's cached prefix: its key, and where it is. One of the two ids is 0."""

    key: bytes
    device_block: int
    host_block: int


class Prefix(NamedTuple):
    """The longest cached prefix of a prompt that leaves at least one token to compute, and the first key not found."""

    hits: list[Hit]
    missed: bytes | None


class Admission(NamedTuple):
    """What else there is to say of an allocate. It is kept, so there is no token id in it.

    `hit_blocks` of the prompt were found, `missed` is the key of the next one; None: there was none to look for.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    hit_blocks: int
    missed: bytes | None
    waited_seconds: float


def find_prefix(books: Books, root: bytes, token_ids: Items[int]) -> Prefix:
    """Look for a prompt's beginning, a block at a time. Reserves and refreshes nothing."""
    hits: list[Hit] = []
    for key in block_keys(root, token_ids[: len(token_ids) - 1], books.block_size):
        if (block := books.device.find(key)) is not None:
            hits.append(Hit(key, block, 0))
        elif (block := books.host.find(key)) is not None:
            hits.append(Hit(key, 0, block))
        else:
            return Prefix(hits, key)
    return Prefix(hits, None)


def allocate(books: Books, item: Allocate, result: StepResult) -> None:
    """Begin a group: take the cached prefix, and blocks for what will be computed next."""
    books.check_new(item.sequence)
    if item.group in books.groups:
        raise IdInUse(f"group {item.group} exists")
    if not item.token_ids or item.compute_tokens < 1 or item.spare_blocks < 0:
        raise InvalidItem("token_ids and compute_tokens must not be empty, spare_blocks not negative")
    if len(item.token_ids) > limits.LARGEST_TABLE * books.block_size:
        raise InvalidItem(f"a prompt of {len(item.token_ids)} tokens is longer than any table can be")
    root = books.root(item.salt)
    sequence = Sequence(item.sequence, item.group, item.request_id, item.salt, books.resets, root)
    sequence.prompt = len(item.token_ids)
    prefix = find_prefix(books, sequence.root, item.token_ids)
    books.check_shares(len(prefix.hits))
    _check_fits(books, item, prefix.hits)
    seen = len(result.evicted)
    _take_prefix(books, sequence, prefix.hits, result)
    cached_tokens = len(prefix.hits) * books.block_size
    room = min(len(item.token_ids), cached_tokens + item.compute_tokens)
    sequence.table += books.grant(books.blocks_for(room) - len(sequence.table), result)
    sequence.room = len(sequence.table) * books.block_size
    books.add(sequence)
    result.hit_tokens += cached_tokens
    result.query_tokens += len(item.token_ids)
    result.tables.append(TableChange(sequence.id, 0, list(sequence.table), sequence.room, cached_tokens))
    hits, prompt = len(prefix.hits), len(item.token_ids)
    story = Admission(item.request_id, prompt, cached_tokens, hits, prefix.missed, item.waited_seconds)
    evicted = result.evicted[seen:]
    result.deeds.append((StepItem.ALLOCATE, sequence.id, sequence.group, sequence.table[:], evicted, story))


def _check_fits(books: Books, item: Allocate, hits: list[Hit]) -> None:
    on_device = [hit.device_block for hit in hits if hit.device_block]
    idle_hits = sum(books.device.count(block) == 0 for block in on_device)
    needed = books.blocks_for(len(item.token_ids)) - len(on_device) + item.spare_blocks
    if needed > books.device.available - idle_hits:
        raise OutOfBlocks(f"{needed} blocks are needed, {books.device.available - idle_hits} are free")


def _take_prefix(books: Books, sequence: Sequence, hits: list[Hit], result: StepResult) -> None:
    # All that is there is held before anything is granted, or a grant could evict it.
    for hit in hits:
        if hit.device_block:
            books.device.hold(hit.device_block)
        else:
            books.host.touch(hit.host_block)
    for hit in hits:
        sequence.table.append(hit.device_block or _bring_back(books, hit, result))
    if hits:
        sequence.committed, sequence.key = len(hits), hits[-1].key
        sequence.computed = len(hits) * books.block_size


def _bring_back(books: Books, hit: Hit, result: StepResult) -> int:
    block = books.grant_one(result)
    books.device.seal(block, hit.key)
    result.sealed_blocks.append(block)
    result.sealed_keys.append(hit.key)
    result.host_to_device.append(Copy(hit.host_block, block))
    return block
