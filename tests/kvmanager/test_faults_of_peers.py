"""Faults that users of other systems have reported of blocks by group of layers, tried here: each with its number.

The issues are at https://github.com/vllm-project/vllm, https://github.com/sgl-project/sglang and
https://github.com/LMCache/LMCache. Faults of states of recurrent layers, which Quire does not serve, cannot occur:
vLLM 27264, 43559, 53912, 54504, 55600, 57266 and 57267.
"""

import pytest

from blocks import (
    Allocate,
    Commit,
    Extend,
    Free,
    FreeReason,
    Length,
    Pin,
    Step,
    StepItem,
    StepRefusal,
    Trim,
    WindowKind,
)
from kvmanager import Audit, Pool, PoolSpec, adopt, report_of
from tests.kvmanager.tiny_pools import end_of

SIZE = 2
WINDOW = 4


def pool_of(blocks=32, window_blocks=32, tokens=WINDOW, **more):
    window = WindowKind("window", tokens, window_blocks, **more)
    return Pool(PoolSpec("engine", 1, "model", SIZE, blocks, windows=(window,)))


class Client:
    """Sends Steps as an engine does: it computes in chunks, commits before it trims, and ends with a free."""

    def __init__(self, pool):
        self.pool = pool
        self.texts = {}

    def step(self, **items):
        applied = self.pool.apply(Step(self.pool.last_step + 1, **items))
        assert self.pool.violations() == []
        return applied

    def begin(self, number, text, compute=None):
        """Allocate; return the cached tokens."""
        self.texts[number] = list(text)
        item = Allocate(number, number, f"r{number}", b"", list(text), compute or len(text))
        applied = self.step(allocates=[item])
        assert applied.result.refusals == ()
        return applied.hit_tokens

    def compute(self, number, end):
        """Compute up to a position: room, length, keys, and what has left the window."""
        sequence = self.pool.sequences[number]
        first, done = sequence.committed_blocks, end // SIZE
        commits = [Commit(number, first, self.texts[number][first * SIZE : done * SIZE])] if done > first else []
        if end > sequence.room_tokens:
            self.step(extends=[Extend(number, ((number, end),))])
        self.step(lengths=[Length(number, end)])
        self.step(commits=commits, trims=[Trim(number, end)])

    def end(self, number):
        self.step(frees=[Free(number, FreeReason.FINISHED)])

    def serve(self, number, text):
        """Compute a whole text and end; return the cached tokens."""
        cached = self.begin(number, text)
        self.compute(number, len(text))
        self.end(number)
        return cached

    @property
    def window(self):
        return self.pool.windows[0]


def kept_but(text, lost, kind):
    """A client of a pool in which all blocks of a text are cached in both kinds, but these logical ones of a kind."""
    client = Client(pool_of())
    client.begin(1, text)
    client.step(commits=[Commit(1, 0, text)])
    state = client.pool.state.kinds[kind]
    for logical in lost:
        state.device.keys.remove(state.sequences[1].table[logical])
    client.window.sequences[1].retained = tuple(range(1, len(text) // SIZE + 1))
    client.pool.apply(Step(client.pool.last_step + 1, frees=[Free(1, FreeReason.FINISHED)]))
    return client


@pytest.mark.parametrize(
    ("cached", "blocks"),
    [
        ("FFFFFFFFFF", 0), ("T", 1), ("TF", 1), ("TT", 2), ("TTF", 2), ("TTT", 3),
        ("TTTFTFFTTFTTT", 13), ("TTFTFFTTFFF", 8), ("TTFTFFTTFFFT", 8),
    ],
)  # fmt: skip
def test_a_hit_ends_at_the_rightmost_window_that_is_whole(cached, blocks):
    text = list(range(SIZE * len(cached)))
    client = kept_but(text, [logical for logical, flag in enumerate(cached) if flag == "F"], kind=1)
    assert client.begin(2, [*text, 99]) == SIZE * blocks


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("lost", range(8))
def test_vllm_46453_all_kinds_hit_behind_the_same_number_of_blocks(kind, lost):
    text = list(range(16))
    client = kept_but(text, [lost], kind)
    client.begin(2, [*text, 99])
    own, other = (state.sequences[2] for state in client.pool.state.kinds)
    assert (own.committed_blocks, own.last_key) == (other.committed_blocks, other.last_key)
    audit = Audit(client.pool.state)
    assert [one for found in audit.slices() for one in found] == []


def test_vllm_33775_an_allocation_does_not_evict_the_hits_of_another_kind():
    client = Client(pool_of(window_blocks=4))
    text = list(range(8))
    client.serve(1, text)
    assert client.window.device.counts.cached == 3
    # Four blocks are needed, and the pool has four: the two hits must stay, the third cached one is evicted.
    assert client.begin(2, [*text[:6], 90, 91, 92]) == 6
    hits = client.window.sequences[2].table[:2]
    assert all(client.window.device.key(block) for block in hits)
    assert len(set(client.window.sequences[2].table)) == 4


def test_vllm_48435_a_long_sequence_does_not_push_out_the_windows_of_others():
    client = Client(pool_of(blocks=200, window_blocks=12))
    short = [1000, 1001, 1002, 1003, 1004, 1005]
    client.serve(1, short)
    client.begin(2, list(range(300)), compute=8)
    for end in range(8, 301, 4):
        client.compute(2, end)
    client.end(2)
    assert client.begin(3, [*short, 7]) == len(short)


def test_vllm_50551_the_next_turn_of_a_conversation_hits_behind_the_answer():
    client = Client(pool_of())
    prompt = list(range(10))
    client.begin(1, prompt)
    client.compute(1, len(prompt))
    answer = list(range(50, 61))
    client.texts[1] += answer
    for end in range(len(prompt) + 1, len(prompt) + len(answer)):
        client.compute(1, end)
    client.end(1)
    whole = (len(prompt) + len(answer) - 1) // SIZE * SIZE
    assert client.begin(2, [*prompt, *answer, 1, 2, 3]) == whole


def test_vllm_45238_a_prefix_that_two_prompts_share_is_hit_by_the_third():
    client = Client(pool_of(blocks=64))
    prefix = list(range(20))
    assert client.serve(1, [*prefix, *range(100, 110)]) == 0
    client.serve(2, [*prefix, *range(200, 210)])
    assert client.serve(3, [*prefix, *range(300, 310)]) == len(prefix)


def test_sglang_30845_and_29350_a_chunk_longer_than_the_window_registers_no_freed_block_as_live():
    client = Client(pool_of(window_blocks=16))
    text = list(range(48))
    client.begin(1, text, compute=16)
    for end in (16, 32, 48):
        client.compute(1, end)
        window = client.window
        live = window.sequences[1].table
        assert window.sequences[1].dropped == (end - WINDOW + 1) // SIZE
        assert len(live) == -(-max(end, client.pool.sequences[1].room_tokens) // SIZE) - window.sequences[1].dropped
        findable = {block for block in range(1, 17) if window.device.key(block) is not None}
        assert findable <= {*live, *window.device.eviction_order()}
    client.end(1)
    assert client.window.device.counts.held == 0


def test_sglang_40283_a_request_that_ends_after_its_prompt_keeps_its_window_alone():
    client = Client(pool_of(blocks=64, window_blocks=40))
    client.serve(1, list(range(64)))
    window = client.window.device
    cached = [block for block in window.eviction_order() if window.key(block) is not None]
    assert len(cached) <= 2 * -(-WINDOW // SIZE), "behind the prompt's last block, and behind its end"
    assert client.begin(2, [*range(64), 99]) == 64


def test_sglang_31486_a_model_of_windows_alone_finds_no_block_that_it_has_released():
    client = Client(pool_of(blocks=64, window_blocks=10))
    text = list(range(40))
    client.begin(1, text, compute=8)
    for end in range(8, 41, 8):
        client.compute(1, end)
        window = client.window
        free = set(window.device.eviction_order()) - set(window.sequences[1].table)
        assert not {block for block in free if window.device.ref_count(block)}
    client.end(1)
    assert client.serve(2, [*text[:12], 99]) == 0, "these blocks have left the window"
    assert client.begin(3, [*text, 99], compute=8) == 40


def test_lmcache_4247_what_a_report_restores_is_hit_in_all_kinds_or_in_none():
    text = list(range(16))
    for kind in (0, 1):
        for lost in range(8):
            client = kept_but(text, [lost], kind)
            again = Client(end_of(adopt(client.pool.spec, report_of(client.pool))))
            hits = [one.begin(2, [*text, 99]) for one in (client, again)]
            assert hits[0] == hits[1]
            for one in (client, again):
                assert [state.sequences[2].committed_blocks * SIZE for state in one.pool.state.kinds] == [hits[0]] * 2
            assert [state.sequences[2].table for state in client.pool.state.kinds] == [
                state.sequences[2].table for state in again.pool.state.kinds
            ]


def test_sglang_27586_ending_a_sequence_releases_no_block_that_it_dropped_and_another_got():
    client = Client(pool_of(window_blocks=8))
    client.begin(1, list(range(12)))
    client.compute(1, 12)
    client.begin(2, list(range(500, 510)))
    taken = client.window.sequences[2].table[:]
    client.end(1)
    assert [client.window.device.ref_count(block) for block in taken] == [1] * len(taken)


def test_sglang_24153_blocks_that_a_hit_holds_are_not_evicted():
    client = Client(pool_of(blocks=64, window_blocks=8))
    text = list(range(12))
    client.serve(1, text)
    assert client.begin(2, [*text[:10], 77]) == 10
    held = client.window.sequences[2].table[:2]
    client.begin(3, list(range(600, 606)))
    assert not set(held) & set(client.window.sequences[3].table)
    refused = client.step(allocates=[Allocate(4, 4, "r4", b"", list(range(700, 708)), 8)])
    assert [one.reason for one in refused.result.refusals] == [StepRefusal.OUT_OF_BLOCKS]


def test_sglang_12007_windows_are_evicted_in_the_order_of_their_release():
    client = Client(pool_of(blocks=64, window_blocks=8))
    texts = [list(range(100 * number, 100 * number + 6)) for number in (1, 2, 3)]
    for number, text in enumerate(texts, 1):
        client.serve(number, text)
    assert client.serve(4, [*texts[0], 7]) == 6, "the first is used again"
    client.serve(5, list(range(900, 906)))
    assert [client.begin(10 + number, [*text, 8]) for number, text in enumerate((texts[0],), 1)] == [6]
    assert client.begin(20, [*texts[1], 8]) == 0


def test_a_prompt_that_does_not_fit_into_a_window_kind_is_refused_whole_and_by_its_name():
    client = Client(pool_of(window_blocks=5))
    before = [kind.device.counts for kind in client.pool.state.kinds]
    applied = client.step(allocates=[Allocate(1, 1, "r1", b"", list(range(40)), 16)])
    [refusal] = applied.result.refusals
    assert (refusal.item, refusal.reason) == (StepItem.ALLOCATE, StepRefusal.OUT_OF_BLOCKS)
    assert "window blocks are needed" in refusal.detail
    assert [kind.device.counts for kind in client.pool.state.kinds] == before
    assert client.pool.sequences == {}


def test_blocks_without_keys_are_granted_before_cached_ones():
    client = Client(pool_of(blocks=64, window_blocks=10))
    client.begin(1, list(range(16)))
    client.compute(1, 16)
    client.end(1)
    cached = set(client.window.device.eviction_order()) - {
        block for block in range(1, 11) if client.window.device.key(block) is None
    }
    assert cached
    client.begin(2, list(range(600, 600 + SIZE * (10 - len(cached)))))
    assert not cached & set(client.window.sequences[2].table)


def test_a_pin_keeps_what_a_prompt_behind_it_needs_in_every_kind():
    client = Client(pool_of(blocks=64, window_blocks=12))
    text = list(range(16))
    client.begin(1, text)
    client.compute(1, 16)
    client.step(pins=[Pin("system", 1, 8)])
    client.end(1)
    for number in range(2, 12):
        client.serve(number, list(range(100 * number, 100 * number + 16)))
    assert client.begin(50, [*text, 9]) == 16
