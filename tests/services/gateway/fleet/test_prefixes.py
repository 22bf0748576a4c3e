from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.fleet.prefixes import SentPrefixes, prefix_keys

tokens = st.lists(st.integers(0, 2), max_size=14)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(tokens, tokens, st.integers(1, 4))
def test_keys_are_equal_exactly_as_far_as_whole_blocks_are(a: list[int], b: list[int], size: int) -> None:
    one, other = prefix_keys(a, b"", size), prefix_keys(b, b"", size)
    assert len(one) == max(0, len(a) - 1) // size, "the last token is always computed"
    assert common(one, other) == min(common(a, b) // size, len(one), len(other))  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2), min_size=3, max_size=9))
def test_prompts_of_another_salt_share_nothing(prompt: list[int]) -> None:
    assert not set(prefix_keys(prompt, b"a", 2)) & set(prefix_keys(prompt, b"b", 2))


def test_what_was_sent_counts_as_cached_until_the_pool_has_no_room_for_it() -> None:
    sent = SentPrefixes(blocks=4)
    first, second, third = ([name + bytes([n]) for n in range(3)] for name in (b"a", b"b", b"c"))
    sent.sent(first)
    assert sent.cached_blocks(first) == 3
    sent.sent(second)
    assert sent.cached_blocks(second) == 3
    assert sent.cached_blocks(first) == 1, "the tail goes before the head"
    sent.sent(third)
    assert (sent.cached_blocks(first), sent.cached_blocks(second), sent.cached_blocks(third)) == (0, 1, 3)


def test_live_requests_add_to_what_is_known_and_ended_ones_do_not() -> None:
    sent = SentPrefixes(blocks=100)
    keys = [bytes([n]) for n in range(5)]
    sent.sent(keys[:3])
    sent.sent(keys)
    assert sent.cached_blocks_beyond(keys, 0) == 5
    sent.ended(keys)
    assert sent.cached_blocks_beyond(keys, 0) == 3
    assert sent.cached_blocks_beyond(keys, 4) == 4
    sent.ended(keys[:3])
    assert sent.cached_blocks_beyond(keys, 0) == 0
    assert sent.cached_blocks(keys) == 5, "memory goes on"
