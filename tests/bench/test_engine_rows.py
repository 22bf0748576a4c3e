"""Rows of the engine's benchmarks: their terms, their null intervals, and what is refused."""

from dataclasses import replace

import pytest
import torch

from bench.engine import decoding, kernels, perplexity, speculation
from bench.report.terms import Terms, UnequalTerms

OURS = Terms(weights="bfloat16", activations="bfloat16", kv_cache="bfloat16", threads=2, work="")
FLOAT32 = Terms(
    weights="float32", activations="float32", kv_cache="float32", threads=torch.get_num_threads(), work="20 windows"
)
LOGPROBS = {"in_blocks": [-3000.0, -3100.0], "transformers": [-3000.0, -3100.0]}
NOISY = {"plain": [1.0] * 5, "again": [1.0, 2.0, 1.0, 0.5, 1.0], "proposing": [1.6] * 5}


def test_perplexities_are_of_float32_and_repeat_exactly() -> None:
    *_, difference = perplexity.rows_of(LOGPROBS, FLOAT32)
    assert (difference.value, difference.met, difference.exact) == (0.0, True, True)


@pytest.mark.parametrize("unequal", [{"weights": "int4"}, {"activations": "bfloat16"}, {"threads": 99}])
def test_a_perplexity_on_other_terms_than_transformers_is_refused(unequal: dict[str, object]) -> None:
    with pytest.raises(UnequalTerms, match="all but the cache"):
        perplexity.rows_of(LOGPROBS, replace(FLOAT32, **unequal))  # type: ignore[arg-type]


def test_a_kernel_is_compared_on_one_set_of_terms_and_with_itself() -> None:
    seconds = {
        "paged": [1.0] * 5,
        "again": [1.0, 1.05, 1.0, 0.95, 1.0],
        "gathered": [4.0] * 5,
        "floor": [0.9, 0.8, 0.9],
    }
    terms = kernels.terms_of(torch.bfloat16, "a batch")
    found = kernels.over("decode_over_gather_and_sdpa", seconds, "gathered", "torch", terms)
    assert (found.value, found.met) == (4.0, True)
    assert found.null == (0.9524, 1.0526)
    assert found.terms["gathered"] == found.terms["quire"] == terms
    floor = kernels.of_the_floor(seconds)
    assert (floor.value, floor.met, floor.limit) == (0.8, True, True)


def test_a_kernel_that_is_faster_than_the_floor_meets_nothing() -> None:
    found = kernels.of_the_floor({"paged": [1.0] * 5, "again": [1.0] * 5, "floor": [1.2]})
    assert (found.met, found.reason) == (False, "void: above a physical limit")


def test_a_gain_by_proposals_within_the_noise_of_equal_engines_is_undecided() -> None:
    ratio, *_ = speculation.rows_of(("editing", 1), NOISY, (10, 5), OURS)
    assert (ratio.value, ratio.met) == (1.6, False)
    assert ratio.reason == "undecided: equal programs differ by 0.5 to 2"
    quiet, *_ = speculation.rows_of(("editing", 1), NOISY | {"again": [1.0] * 5}, (10, 5), OURS)
    assert quiet.met


def test_decoding_methods_are_compared_with_greedy_answers_of_the_same_engine() -> None:
    seconds = {(name, 2): [1.0] * 5 for name in decoding.WAYS} | {("beams", 2): [2.0] * 5}
    found = {one.metric: one for one in decoding.rows_of(seconds, 2, OURS)}
    assert found["beams_2_over_greedy"].value == 0.5
    assert found["beams_2_over_greedy"].terms == {"beams": OURS, "greedy": OURS}
    assert found["samples_2_over_greedy"].null == (1.0, 1.0)
