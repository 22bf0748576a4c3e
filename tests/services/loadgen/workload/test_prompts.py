"""Tokens of prompts are functions of their names."""

from hypothesis import given
from hypothesis import strategies as st

from services.loadgen.workload.prompts import WORDS, Kind, Piece, PromptMaker, length

NAMES = st.tuples(st.sampled_from(Kind), st.integers(0, 2**31)).map(lambda name: (int(name[0]), name[1]))


@given(NAMES, st.integers(1, 600), st.integers(1, 600))
def test_equal_names_give_equal_tokens_at_any_length(name: tuple[int, int], some: int, more: int) -> None:
    maker = PromptMaker(7, 50_000)
    short, long = sorted((some, more))
    assert maker.token_ids((Piece(name, long),))[:short] == maker.token_ids((Piece(name, short),))


@given(NAMES, NAMES)
def test_different_names_give_different_tokens(one: tuple[int, int], other: tuple[int, int]) -> None:
    maker = PromptMaker(7, 50_000)
    ids = [maker.token_ids((Piece(name, 32),)) for name in (one, other)]
    assert (ids[0] == ids[1]) == (one == other)


@given(st.integers(8, 300_000), st.integers(0, 2**48))
def test_tokens_are_of_the_vocabulary_without_its_first_and_last_ids(size: int, seed: int) -> None:
    ids = PromptMaker(seed, size).token_ids((Piece((Kind.BLOCK, 3), 200),))
    assert len(ids) == 200
    assert min(ids) >= min(256, size // 4)
    assert max(ids) < size - size // 64


def test_another_seed_makes_another_prompt_that_shares_as_much() -> None:
    shared, ends = Piece((Kind.PREFIX, 0), 40), [Piece((Kind.UNIQUE, number), 8) for number in (0, 1)]
    first, second = ([PromptMaker(seed, 1000).token_ids((shared, end)) for end in ends] for seed in (1, 2))
    for one, other in (first, second):
        assert one[:40] == other[:40]
        assert one[40:] != other[40:]
    assert first[0][:40] != second[0][:40]
    assert length((shared, ends[0])) == len(first[0]) == 48


def test_a_text_has_a_word_for_each_token_and_equal_tokens_are_equal_words() -> None:
    maker = PromptMaker(1, 32_000)
    one, other = (maker.text((Piece((Kind.BLOCK, 5), 16), Piece((Kind.UNIQUE, number), 4))) for number in (1, 2))
    assert len(one.split()) == 20
    assert set(one.split()) <= set(WORDS)
    assert one.split()[:16] == other.split()[:16]
    assert one != other
