"""N-grams find what followed before, and tokens are proposed while measured steps say that they pay."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.schedule.speculation.acceptance import AcceptanceRates
from engine.schedule.speculation.ngram_index import MATCHES, Draft, NgramIndex
from engine.schedule.speculation.speculation_costs import SpeculationCosts

SLOTS = 1 << 15


def latest_longest_match(tokens: list[int], most: int) -> Draft | None:
    """Search all places anew."""
    for match in MATCHES:
        for end in range(len(tokens) - 1, match - 1, -1):
            if tokens[end - match : end] == tokens[-match:]:
                later = tokens[end:] * (most + 1)
                return Draft(tuple(later[:most]), match)
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9), st.lists(st.integers(1, 7)))
def test_the_latest_of_the_longest_matches_is_continued(tokens: list[int], most: int, parts: list[int]) -> None:
    grams = {tuple(tokens[end - match : end]) for match in MATCHES for end in range(match, len(tokens) + 1)}
    assume(len({hash(gram) % SLOTS for gram in grams}) == len(grams))
    index, known = NgramIndex(longest=100_000), 0
    for part in [*parts, len(tokens)]:  # tokens arrive one or several at a time
        known = min(known + part, len(tokens))
        assert index.draft(tokens[:known], most) == latest_longest_match(tokens[:known], most)


def test_matches_shorter_than_the_minimum_propose_nothing() -> None:
    tokens = [1, 2, 3, 9, 7, 2, 3]
    assert NgramIndex(longest=100).draft(tokens, 2) == Draft((9, 7), 2)
    assert NgramIndex(longest=100, least=3).draft(tokens, 2) is None
    assert NgramIndex(longest=100, least=3).draft([1, 2, 3, 9, 1, 2, 3], 1) == Draft((9,), 3)


def test_a_full_table_forgets_n_grams_and_makes_up_none() -> None:
    draw = random.Random(1)
    tokens = [draw.randrange(40) for _ in range(3000)]
    index, found = NgramIndex(longest=8), 0  # far more tokens than it was made for
    for length in range(1, len(tokens)):
        draft = index.draft(tokens[:length], 1)
        if draft is not None:
            found += 1
            seen = [*tokens[length - draft.match : length], *draft.token_ids]
            assert any(tokens[at : at + len(seen)] == seen for at in range(length - draft.match))
    assert found > 100


def test_rates_follow_what_is_accepted_and_tokens_behind_a_refused_one_do_not_count() -> None:
    rates = AcceptanceRates()
    before = rates.chances(3, 1)[0]
    rates.count(3, accepted=0, proposed=8)
    once = rates.chances(3, 1)[0]
    assert once == pytest.approx(0.9 * before)
    for _ in range(20):
        rates.count(3, accepted=8, proposed=8)
    first, second = rates.chances(3, 2)
    assert first > 0.99
    assert second == pytest.approx(first * first)
    assert rates.chances(2, 1) == AcceptanceRates().chances(2, 1), "other matches have their own rate"


def test_a_new_sequence_starts_with_the_average_and_at_least_half_the_first_guess() -> None:
    rates = AcceptanceRates()
    first_guess = rates.chances(4, 1)[0]
    for _ in range(100):
        rates.count(4, accepted=0, proposed=1)
        rates.count(2, accepted=1, proposed=1)
    assert rates.for_sequence().chances(4, 1) == [pytest.approx(first_guess / 2)]
    assert rates.for_sequence().chances(2, 1) == rates.chances(2, 1)


def test_drafts_that_are_not_tried_become_more_likely_until_they_are() -> None:
    rates = AcceptanceRates()
    for _ in range(50):
        rates.count(4, accepted=0, proposed=1)
    low = rates.chances(4, 1)[0]
    for _ in range(300):
        rates.forget(4)
    assert low < 0.01
    assert 0.25 < rates.chances(4, 1)[0] < 0.5


def measured(row_seconds: float, sequences: int = 4, fixed: float = 1.0) -> SpeculationCosts:
    """Costs after steps of `fixed` seconds and some for each row."""
    costs = SpeculationCosts()
    for proposed in (0, 0, 0, 8, 8, 8, 8, 0):
        costs.observe(sequences, proposed, fixed + row_seconds * (sequences + proposed))
    return costs


def test_steps_without_proposals_are_measured_first() -> None:
    costs = SpeculationCosts()
    for _ in range(3):
        assert costs.choose(4, [1.0] * 8) == 0
        costs.observe(4, 0, 1.0)
    assert costs.choose(4, [1.0] * 8) == 8
    assert costs.choose(40, [1.0] * 8) == 0, "a batch of another size was not measured"
    assert costs.choose(4, [1.0] * 8, random=True) == 0, "nor one that is not greedy"


@pytest.mark.parametrize(("row_seconds", "taken"), [(0.0, 8), (0.05, 8), (1000.0, 0)])
def test_certain_tokens_are_proposed_unless_rows_cost_as_much_as_tokens_bring(row_seconds: float, taken: int) -> None:
    assert measured(row_seconds).choose(4, [0.95] * 8) == taken


def test_of_unequal_tokens_those_are_proposed_that_raise_the_tokens_per_second() -> None:
    costs = measured(row_seconds=0.1)
    chances = [0.9, 0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.01]
    rates = []
    for taken in range(len(chances) + 1):
        seconds = costs._batches[3, False].seconds(4 + taken)
        rates.append((4 + sum(chances[:taken])) / seconds)
    assert costs.choose(4, chances) == rates.index(max(rates))
    assert 0 < rates.index(max(rates)) < len(chances)


def test_a_step_without_proposals_is_measured_again_after_many_with_them() -> None:
    costs = measured(row_seconds=0.01)
    taken = []
    for _ in range(130):
        taken.append(costs.choose(4, [0.9] * 8))
        costs.observe(4, taken[-1], 1.0)
    assert taken.count(0) == 2
    assert taken[64] == 0


def test_a_few_tokens_are_proposed_again_after_many_steps_that_declined() -> None:
    costs = measured(row_seconds=1000.0, sequences=8)
    taken = [costs.choose(8, [0.5] * 8) for _ in range(128)]
    assert [count for count in taken if count] == [2, 2]


@pytest.mark.parametrize("row_seconds", [0.0, 0.05, 0.3, 1000.0])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_a_step_is_searched_only_if_a_token_of_the_largest_chance_would_be_proposed(
    row_seconds: float, chance: float
) -> None:
    searching, searched = measured(row_seconds), []
    for _ in range(200):
        if searching.may_pay(4, chance):
            searched.append(searching.choose(4, [chance] * 8))
    always = measured(row_seconds)
    taken = [always.choose(4, [chance] * 8) for _ in range(200)]
    assert sum(searched) == sum(taken)
    assert 0 not in searched


def test_one_interrupted_step_does_not_turn_proposals_off() -> None:
    costs = measured(row_seconds=0.05)
    costs.observe(4, 8, 60.0)
    assert costs.choose(4, [0.9] * 8) > 0
