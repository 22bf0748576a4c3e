"""The terms of two sides: equal, or named."""

from dataclasses import replace

import pytest

from bench.report.terms import Terms, UnequalTerms, check_equal

OURS = Terms(
    weights="bfloat16", activations="bfloat16", kv_cache="bfloat16", threads=2, processes=1, work="B=8, 128/64"
)


@pytest.mark.parametrize(
    ("theirs", "field", "name_that_says_so"),
    [
        (replace(OURS, weights="int4"), "weights", "b8_over_int4"),
        (replace(OURS, activations="float32"), "activations", "b8_over_torch_float32"),
        (replace(OURS, kv_cache="int8"), "kv_cache", "b8_int8_kv_over"),
        (replace(OURS, threads=1), "threads", "b8_over_one_thread"),
        (replace(OURS, processes=3), "processes", "over_in_process"),
        (replace(OURS, start="cold"), "start", "warm_over_cold"),
        (replace(OURS, work="B=8, 16/128"), "work", "b8_as_users_run_it_over_the_peer"),
    ],
)
def test_a_difference_is_refused_unless_the_name_states_it(theirs: Terms, field: str, name_that_says_so: str) -> None:
    sides = {"quire": OURS, "vllm": theirs}
    with pytest.raises(UnequalTerms, match=f"b8_over_the_peer: {field} is .* of quire, but .* of vllm"):
        check_equal("b8_over_the_peer", sides)
    check_equal(name_that_says_so, sides)


def test_a_name_that_states_one_difference_does_not_cover_another() -> None:
    theirs = replace(OURS, weights="int4", threads=1)
    with pytest.raises(UnequalTerms, match="threads is 2 of quire, but 1 of vllm"):
        check_equal("b8_int4_over_the_peer", {"quire": OURS, "vllm": theirs})


def test_servers_may_differ_in_their_number_of_processes_and_in_nothing_else() -> None:
    check_equal(
        "closed_32_as_servers_over_vllm", {"quire": replace(OURS, processes=3), "vllm": replace(OURS, processes=2)}
    )
    for theirs in (replace(OURS, threads=1), replace(OURS, weights="float32"), replace(OURS, start="cold")):
        with pytest.raises(UnequalTerms):
            check_equal("closed_32_as_servers_over_vllm", {"quire": OURS, "vllm": theirs})


def test_every_pair_of_programs_is_compared() -> None:
    sides = {"quire": OURS, "openvino": OURS, "vllm": replace(OURS, threads=1)}
    with pytest.raises(UnequalTerms):
        check_equal("b8_over_the_better_peer", sides)
