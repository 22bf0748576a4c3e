"""Block keys: chained digests over the prefix."""

from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocks import KEY_BYTES, block_key, block_keys, prefix_keys, root_key

prompts = st.lists(st.integers(0, 2), max_size=14)
sizes = st.integers(1, 4)


def chained(token_ids, size, whole):
    keys = [root_key("model", b"salt")]
    for start in range(0, whole * size, size):
        keys.append(block_key(keys[-1], token_ids[start : start + size]))
    return keys[1:]


@given(prompts, sizes)
def test_the_keys_of_a_prompt_are_those_of_its_blocks_one_after_the_other_in_a_list_and_in_an_array(prompt, size):
    expected = chained(prompt, size, len(prompt) // size)
    for tokens in (prompt, array("i", prompt)):
        assert list(block_keys(root_key("model", b"salt"), tokens, size)) == expected
        assert chained(tokens, size, len(prompt) // size) == expected


@given(prompts, sizes)
def test_the_shareable_prefix_of_a_prompt_leaves_at_least_one_token(prompt, size):
    expected = chained(prompt, size, max(0, len(prompt) - 1) // size)
    for tokens in (prompt, array("i", prompt)):
        assert list(prefix_keys(root_key("model", b"salt"), tokens, size)) == expected


@given(prompts, prompts, sizes)
def test_two_prompts_have_equal_keys_for_their_equal_leading_blocks(one, other, size):
    keys = [chained(prompt, size, len(prompt) // size) for prompt in (one, other)]
    for end, (a, b) in enumerate(zip(*keys, strict=False), 1):
        assert (a == b) == (one[: end * size] == other[: end * size])


@given(prompts, sizes)
def test_prompts_of_another_salt_share_nothing(prompt, size):
    some, others = (set(prefix_keys(root_key("model", salt), prompt, size)) for salt in (b"a", b"b"))
    assert not some & others


def test_a_reset_changes_the_root():
    assert len({root_key("model", b"", resets) for resets in range(3)}) == 3


def test_an_adapter_changes_the_root_and_no_salt_or_reset_gives_the_same():
    adapter, other = sha256(b"weights").digest(), sha256(b"others").digest()
    roots = [
        root_key("model", salt, resets, one) for salt in (b"", adapter) for resets in (0, 1) for one in (b"", adapter)
    ]
    assert (
        len({*roots, root_key("model", b"", 0, other), root_key("model", b"", int.from_bytes(adapter[:8], "little"))})
        == 10
    )


def test_21_fingerprint_and_salt_do_not_run_into_each_other():
    assert len({root_key("ab", b"c"), root_key("a", b"bc"), root_key("abc", b""), root_key("", b"abc")}) == 4


@pytest.mark.parametrize("tokens", [[1, 2, 3, 5], [5, 2, 3, 4], [2, 1, 3, 4], [1, 2, 3], [1, 2, 3, 4, 0]])
def test_25_another_token_order_or_count_makes_another_key(tokens):
    parent = root_key("model", b"")
    assert block_key(parent, tokens) != block_key(parent, [1, 2, 3, 4])


def test_24_keys_do_not_change_between_versions():
    # A cache that outlives a version of this code must not change its meaning unnoticed.
    key = block_key(root_key("model", b"salt"), [1, 2, 3, 2**31 - 1])
    assert key.hex() == "833604dd919235412ca647c3700ba259aaf54f9c1ce34ccfdb5610756b6e6be0"
    assert len(key) == KEY_BYTES
