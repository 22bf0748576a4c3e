"""The scenarios of FlexAttention: small ones on the demo model, and the arithmetic of their rows."""

from collections.abc import Mapping
from typing import Any

import pytest

from bench.papers.case import Values
from bench.papers.figures.long_scenarios import FIGURES
from bench.papers.measured import long_scenarios
from tests.bench.papers.test_measured_figures import drawn

NAMED = {figure.name: figure for figure in FIGURES}
PROMPTS = [20, 60]


def rows(name: str, values: Mapping[str, Values]) -> dict[str, float | None]:
    return {row.metric.removeprefix(f"{name}_"): row.value for row in NAMED[name].rows(values)}


@pytest.mark.usefixtures("demo_model")
def test_a_sequence_has_the_seconds_of_the_last_tokens_before_each_length() -> None:
    values = long_scenarios.one_sequence(60, [30, 60], 64, layers=3)
    assert {length: len(seconds) for length, seconds in values["seconds"].items()} == {"30": 13, "60": 43}
    assert sum(values["seconds"]["60"]) < values["total_seconds"]
    assert values["kv_bytes"] == 64 * 3 * 2 * 3 * 64 * 2
    assert values["terms"]["weights"] == "bfloat16"


@pytest.mark.usefixtures("demo_model")
def test_prompts_of_a_batch_are_computed_anew_in_each_repetition() -> None:
    values = long_scenarios.mixed_batch(PROMPTS, 3, 64, 2)
    assert {prompt: len(seconds) for prompt, seconds in values["first_seconds"].items()} == {"20": 2, "60": 2}
    assert max(max(seconds) for seconds in values["first_seconds"].values()) < max(values["seconds"])
    assert values["generated"] == 6
    assert values["overhead"] == pytest.approx((64 + 64) / (23 + 63) - 1)


@pytest.mark.usefixtures("demo_model")
def test_each_turn_of_a_chat_has_a_first_token_and_others() -> None:
    values = long_scenarios.growing_chat([80, 160], 4, 64, 2)
    assert {length: len(seconds) for length, seconds in values["first_seconds"].items()} == {"80": 2, "160": 2}
    assert {length: len(seconds) for length, seconds in values["seconds"].items()} == {"80": 6, "160": 6}
    assert min(values["first_seconds"]["160"]) > 0


@pytest.mark.usefixtures("demo_model")
def test_pages_and_fused_attention_decode_at_the_same_lengths_on_equal_terms() -> None:
    values = long_scenarios.paged_and_fused([40, 80], 64, 1)
    assert [sorted(values["seconds"][way]) for way in ("paged", "fused")] == [["40", "80"], ["40", "80"]]
    assert all(len(times) == 16 for seconds in values["seconds"].values() for times in seconds.values())


def chat_values() -> dict[str, Any]:
    case = {"first_seconds": {"1000": [0.1, 0.2, 0.3]}, "seconds": {"1000": [0.01, 0.02, 0.04]}}
    return {f"flex_chat_{size}": case for size in (64, 128)}


def test_repeated_rows_have_their_deviation_beside_them() -> None:
    found = rows("flex_chat", chat_values())
    assert found["64_1000_first_token_ms"] == 200.0
    assert found["64_1000_first_token_ms_deviation"] == 100.0
    assert found["128_1000_ms"] == 20.0


def test_the_first_tokens_of_a_chat_are_drawn_for_each_page_size() -> None:
    (axes,) = drawn(NAMED["flex_chat"], chat_values())
    assert axes.get_legend_handles_labels()[1] == ["pages of 64", "pages of 128"]


def test_full_runs_have_both_page_sizes_the_papers_lengths_and_three_runs() -> None:
    cases = {case.name: case.arguments for figure in FIGURES for case in figure.cases(False)}
    assert {arguments["page_size"] for arguments in cases.values()} == {64, 128}
    assert cases["flex_one_sequence_64"]["tokens"] == 100_000
    assert cases["flex_mixed_batch_64"]["prompts"] == list(range(500, 8_001, 500))
    assert [max(cases[f"flex_{name}_128"]["lengths"]) for name in ("chat", "fused")] == [32_000, 32_000]
    assert {arguments["repetitions"] for arguments in cases.values() if "repetitions" in arguments} == {3}
