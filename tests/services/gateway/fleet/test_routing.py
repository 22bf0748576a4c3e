from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.fleet.routing import Candidate, RecentLoad, Router, RoutingChoice, RoutingPolicy, RoutingReason

PROMPT = 1000
candidates = st.lists(
    st.builds(
        Candidate,
        engine_id=st.sampled_from("abcdef"),
        cached_tokens=st.integers(0, PROMPT),
        recent_tokens=st.integers(0, 5000).map(float),
        requests=st.integers(0, 9),
        pending_prefill_tokens=st.integers(0, 3000),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one.engine_id,
)


@given(st.sampled_from(RoutingPolicy), candidates, st.integers(0, 5000))
def test_the_choice_is_a_candidate_and_independent_of_their_order(
    policy: RoutingPolicy, those: list[Candidate], slack: int
) -> None:
    choice = Router(policy, slack).choose(those, PROMPT)
    assert choice.engine_id in {one.engine_id for one in those}
    assert Router(policy, slack).choose(those[::-1], PROMPT) == choice
    assert (choice.reason is RoutingReason.ONLY) == (len(those) == 1)


@given(candidates, st.integers(0, 5000))
def test_an_engine_above_the_load_bound_is_chosen_only_with_the_least_load(those: list[Candidate], slack: int) -> None:
    choice = Router(RoutingPolicy.PREFIX, slack).choose(those, PROMPT)
    chosen = next(one for one in those if one.engine_id == choice.engine_id)
    work = PROMPT - chosen.cached_tokens
    share = (sum(one.recent_tokens for one in those) + work) / len(those)
    assert (
        len(those) == 1
        or chosen.recent_tokens + work <= 1.25 * share + slack
        or chosen.recent_tokens == min(one.recent_tokens for one in those)
    )


def test_the_longest_cached_prefix_wins() -> None:
    a, b = Candidate("a", cached_tokens=100), Candidate("b", cached_tokens=900, requests=5)
    assert Router(RoutingPolicy.PREFIX, 10_000).choose([a, b], PROMPT) == RoutingChoice("b", RoutingReason.PREFIX)


def test_pending_prefill_outweighs_a_cached_prefix() -> None:
    a, b = Candidate("a", cached_tokens=100), Candidate("b", cached_tokens=900, pending_prefill_tokens=2000)
    assert Router(RoutingPolicy.PREFIX, 10_000).choose([a, b], PROMPT) == RoutingChoice("a", RoutingReason.LOAD)


def test_recent_load_above_the_share_outweighs_a_cached_prefix() -> None:
    a, b = Candidate("a"), Candidate("b", cached_tokens=900, recent_tokens=5000)
    assert Router(RoutingPolicy.PREFIX, 0).choose([a, b], PROMPT) == RoutingChoice("a", RoutingReason.LOAD)
    assert Router(RoutingPolicy.PREFIX, 10_000).choose([a, b], PROMPT) == RoutingChoice("b", RoutingReason.PREFIX)


def test_a_prompt_without_a_cached_prefix_goes_to_the_least_recent_load() -> None:
    those = [Candidate("a", recent_tokens=300), Candidate("b", recent_tokens=200), Candidate("c", recent_tokens=250)]
    assert Router(RoutingPolicy.PREFIX, 10_000).choose(those, PROMPT) == RoutingChoice("b", RoutingReason.NEW)


def test_least_loaded_counts_requests_before_tokens() -> None:
    a, b = Candidate("a", requests=2), Candidate("b", requests=1, pending_prefill_tokens=5000)
    assert Router(RoutingPolicy.LEAST_LOADED).choose([a, b], PROMPT) == RoutingChoice("b", RoutingReason.LEAST_LOADED)


def test_round_robin_is_even_when_an_engine_leaves_and_returns() -> None:
    router = Router(RoutingPolicy.ROUND_ROBIN)
    three, two = [Candidate("c"), Candidate("a"), Candidate("b")], [Candidate("c"), Candidate("a")]
    assert [router.choose(three, PROMPT).engine_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert [router.choose(two, PROMPT).engine_id for _ in range(3)] == ["c", "a", "c"]
    assert Counter(router.choose(three, PROMPT).engine_id for _ in range(30)) == {"a": 10, "b": 10, "c": 10}


def test_recent_load_decays() -> None:
    work = RecentLoad(seconds=10.0)
    work.add(5.0, 100)
    assert work.tokens(5.0) == 100
    assert work.tokens(15.0) == pytest.approx(100 / 2.718281828)
    work.add(15.0, 10)
    assert work.tokens(15.0) == pytest.approx(10 + 100 / 2.718281828)


def test_recent_load_is_corrected_but_never_below_zero() -> None:
    work = RecentLoad(seconds=10.0)
    work.add(0.0, 100)
    work.add(0.0, -30)
    assert work.tokens(0.0) == 70
    work.add(100.0, -30)
    assert work.tokens(100.0) == 0
