from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.fleet.routing import Candidate, RecentLoad, Router, RoutingPolicy, RoutingReason

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


@pytest.mark.parametrize(
    ("policy", "slack", "a", "b", "choice"),
    [
        ("prefix", 9999, {"cached_tokens": 100}, {"cached_tokens": 900, "requests": 5}, ("b", "prefix")),
        (
            "prefix",
            10_000,
            {"cached_tokens": 100},
            {"cached_tokens": 900, "pending_prefill_tokens": 2000},
            ("a", "load"),
        ),
        ("prefix", 0, {}, {"cached_tokens": 900, "recent_tokens": 5000}, ("a", "load")),
        ("prefix", 9999, {}, {"cached_tokens": 900, "recent_tokens": 5000}, ("b", "prefix")),
        ("prefix", 9999, {"recent_tokens": 300}, {"recent_tokens": 200}, ("b", "new")),
        ("least-loaded", 0, {"requests": 2}, {"requests": 1, "pending_prefill_tokens": 5000}, ("b", "least-loaded")),
    ],
    ids=[
        "the longest cached prefix wins",
        "pending prefill outweighs a cached prefix",
        "recent load above the share outweighs a cached prefix",
        "recent load within the slack does not",
        "no cached prefix: the least recent load wins",
        "requests count before tokens",
    ],
)
def test_the_choice_between_two_engines(
    policy: str, slack: int, a: dict[str, Any], b: dict[str, Any], choice: tuple[str, str]
) -> None:
    chosen = Router(RoutingPolicy(policy), slack).choose([Candidate("a", **a), Candidate("b", **b)], PROMPT)
    assert (chosen.engine_id, chosen.reason.value) == choice


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
