from hypothesis import given
from hypothesis import strategies as st

from blocks import blocks_for


@given(st.integers(0, 50), st.integers(1, 9))
def test_tokens_take_the_least_number_of_blocks_that_hold_them(tokens, size):
    held = blocks_for(tokens, size) * size
    assert tokens <= held < tokens + size
