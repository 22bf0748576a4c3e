"""Offsets of tokens in the text of a completion."""

import pytest

from services.gateway.http.openai.text_offsets import TextOffsets, output_offsets, prompt_offsets
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.tokenizer import REPLACEMENT, Tokenizer
from tests.services.gateway.text.test_detokenizer import KINDS, LINES
from tests.services.gateway.text.test_tokenizer import trained

TEXTS = [*LINES, "a a好 é京京b", "", "one two", "unable."]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("text", TEXTS)
def test_a_token_begins_where_the_text_of_those_before_it_ends(make: object, text: str) -> None:
    tokenizer = Tokenizer(make(), ChatTemplate(None, {}))  # type: ignore[operator]
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    offsets = TextOffsets(tokenizer, special_tokens=False).of(ids)
    assert offsets == sorted(offsets)
    for at, offset in enumerate(offsets):
        before = tokenizer.decode(ids[:at])
        assert offset <= len(whole)
        if not before.endswith(REPLACEMENT):
            assert offset == len(before)


def test_tokens_of_one_character_begin_with_it() -> None:
    tokenizer = Tokenizer(trained(), ChatTemplate(None, {}))
    token_ids = tokenizer.encode("a\N{TAMIL LETTER KA}b")
    assert len(token_ids) == 6  # <s>, three bytes of the letter
    assert prompt_offsets(tokenizer, "a\N{TAMIL LETTER KA}b", token_ids, given_as_text=True) == [0, 0, 1, 1, 1, 2]
    assert prompt_offsets(tokenizer, "a\N{TAMIL LETTER KA}b", token_ids, given_as_text=False) == [0, 0, 1, 1, 1, 2]


def test_the_name_of_a_special_token_counts_where_the_text_has_it() -> None:
    tokenizer = Tokenizer(trained(), ChatTemplate(None, {}))
    text = "a</s>b"
    token_ids = tokenizer.encode(text)
    assert prompt_offsets(tokenizer, text, token_ids, given_as_text=True) == [0, 0, 1, 5]
    assert output_offsets(tokenizer, "ab", token_ids[1:], special_tokens=False) == [0, 1, 1]
    assert output_offsets(tokenizer, text, token_ids[1:], special_tokens=True) == [0, 1, 5]


def test_tokens_of_a_stop_string_that_is_left_out_begin_at_the_end() -> None:
    tokenizer = Tokenizer(trained(), ChatTemplate(None, {}))
    token_ids = tokenizer.encode_parts(["abcd"])[0]
    assert len(token_ids) == 4
    assert output_offsets(tokenizer, "ab", token_ids, special_tokens=False) == [0, 1, 2, 2]
