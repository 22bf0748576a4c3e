"""Stop strings over tokens, compared with decoding the whole text after each token."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from services.engine.smg.stop_strings import FoundStop, StopStrings

TEXTS = st.text("ab ö🙂", max_size=12)
STOPS = st.lists(st.text("ab ö🙂", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def backend(tiny_model: Callable[[str], Path]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))


def by_whole_texts(
    backend: tokenizers.Tokenizer, stops: list[str], min_tokens: int, token_ids: list[int]
) -> FoundStop | None:
    """Return the stop string that first ends within a token behind `min_tokens`; of those, the first, then longest."""
    for end in range(min_tokens + 1, len(token_ids) + 1):
        before, text = (backend.decode(token_ids[:at]).rstrip("\ufffd") for at in (end - 1, end))
        found = [
            (at + len(stop), -len(stop), stop)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if found:
            return FoundStop(min(found)[2], end)
    return None


@given(TEXTS, STOPS, st.integers(0, 4), st.data())
def test_the_first_character_that_completes_a_stop_string_ends_the_sample(
    backend: tokenizers.Tokenizer, text: str, stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    token_ids = backend.encode(text).ids
    expected = by_whole_texts(backend, stops, min_tokens, token_ids)
    search = StopStrings(backend, stops, min_tokens, skip_special_tokens=True)
    taken = 0
    while taken < len(token_ids):
        step = data.draw(st.integers(1, 3))
        if found := search.push(token_ids[taken : taken + step]):
            assert FoundStop(found.text, taken + found.tokens) == expected
            return
        taken += step
    assert expected is None
