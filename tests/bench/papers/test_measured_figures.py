"""Figures of the papers that are measured on the CPU: the arithmetic of their rows, and small measurements."""

from collections.abc import Mapping
from math import log
from typing import Any

import pytest

from bench.engine.perplexity import perplexity
from bench.papers.case import Values
from bench.papers.figure import Figure
from bench.papers.figures import attention_kernels, long_contexts, recovery_costs
from bench.papers.measured import kernel_times, mixed_lengths, peak_memory, recovery
from bench.papers.measured.contiguous_model import ContiguousModel, ContiguousSequence

FIGURES = {
    figure.name: figure for module in (attention_kernels, recovery_costs, long_contexts) for figure in module.FIGURES
}
MIB = 1024 * 1024


def rows(name: str, values: Mapping[str, Values]) -> dict[str, float | None]:
    return {row.metric.removeprefix(f"{name}_"): row.value for row in FIGURES[name].rows(values)}


def measured(figure: Figure) -> dict[str, Values]:
    return {case.name: case.run(**case.arguments) for case in figure.cases(True)}


def drawn(figure: Figure, values: Mapping[str, Values]) -> list[Any]:
    """Draw a figure; return its axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(*figure.panels, squeeze=False)
    figure.draw(list(axes.flat), values)
    drawing.canvas.draw()
    pyplot.close(drawing)
    return list(axes.flat)


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
@pytest.mark.parametrize("quick", [True, False])
def test_the_cases_of_a_measured_figure_run_alone_and_begin_with_its_name(figure: Figure, quick: bool) -> None:
    cases = figure.cases(quick)
    assert all(case.timed and case.name.startswith(figure.name) for case in cases)
    assert len({case.name for case in cases}) == len(cases)


def kernel_seconds(over_one_block: float, over_sdpa: float) -> dict[str, list[float]]:
    """Three repetitions on a machine that becomes slower, and an outlier that the median of ratios must ignore."""
    paged = [0.012, 0.024, 0.9]
    return {
        "paged": paged,
        "in_order": [0.012, 0.024, 0.036],
        "one_block": [paged[0] / over_one_block, paged[1] / over_one_block, 0.036],
        "sdpa": [paged[0] / over_sdpa, paged[1] / over_sdpa, 0.036],
    }


def test_figure_18a_has_the_lowest_and_highest_ratio_to_each_peer() -> None:
    sizes = {"b8_c64": kernel_seconds(1.5, 0.5), "b32_c256": kernel_seconds(1.25, 0.75)}
    found = rows("figure_18a", {"figure_18a_kernels": {"seconds": sizes, "layers": 30}})
    assert found["b8_c64_paged_us_per_layer"] == 800.0
    assert [found[f"{end}_over_one_block_ratio"] for end in ("lowest", "highest")] == [1.25, 1.5]
    assert [found[f"{end}_over_sdpa_ratio"] for end in ("lowest", "highest")] == [0.5, 0.75]


def test_figure_18b_compares_each_block_size_with_16() -> None:
    seconds = {"1": [0.04, 0.08], "16": [0.01, 0.02], "256": [0.02, 0.04]}
    case = {"seconds": seconds, "layers": 10, "packed": [16, 256]}
    found = rows("figure_18b_kernels", {f"figure_18b_kernels_{mix}": case for mix in ("sharegpt", "alpaca")})
    assert [found[f"alpaca_{size}_over_16_ratio"] for size in (1, 16, 256)] == [4.0, 1.0, 2.0]
    assert found["sharegpt_16_us_per_layer"] == 1500.0


def recovery_values() -> dict[str, Values]:
    slow = {"swap_out": [0.06, 0.06], "swap_in": [0.08, 0.08], "recompute": [0.02, 0.02]}
    fast = {"swap_out": [0.006, 0.006], "swap_in": [0.004, 0.004], "recompute": [0.024, 0.024]}
    return {"figure_19a_recovery": {"seconds": {"1": slow, "256": fast}, "tokens": 1024}}


def test_figure_19a_compares_recomputation_with_swapping_out_and_in() -> None:
    found = rows("figure_19a", recovery_values())
    assert [found[f"swap_{size}_ms"] for size in (1, 256)] == [140.0, 10.0]
    assert found["recompute_over_swap_1_ratio"] == pytest.approx(1 / 7, abs=1e-4)
    assert found["highest_recompute_over_swap_ratio"] == 2.4
    assert found["recompute_highest_over_lowest_ratio"] == 1.2
    assert found["swap_1_over_256_ratio"] == 14.0


def test_figure_19a_has_the_papers_ratios_as_marks() -> None:
    _, right = drawn(FIGURES["figure_19a"], recovery_values())
    marks = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert marks["paper, over PCIe"] == [0.14, 1.0, 1.0, 1.0]
    assert marks["paper: never above 1.2"] == [1.2, 1.2]


def memory_values(paged_increment: int, default_increment: int) -> dict[str, Values]:
    common = {"kv_bytes": 45 * MIB, "seconds": [0.02, 0.03]}
    paged = {"model_bytes": 900 * MIB, "peak_bytes": (900 + paged_increment) * MIB, **common}
    default = {"model_bytes": 600 * MIB, "peak_bytes": (600 + default_increment) * MIB, "weights_bytes": 250 * MIB}
    return {"flex_figure_2_paged_2048": paged, "flex_figure_2_default_2048": {**default, **common}}


def test_flex_figure_2_compares_the_increments_with_equal_weights() -> None:
    found = rows("flex_figure_2", memory_values(50, 40))
    assert found["paged_2048_incremental_mib"] == 50.0
    assert found["default_2048_incremental_mib"] == 40.0
    assert found["incremental_2048_paged_over_default_ratio"] == 1.25
    assert found["total_2048_paged_over_default_ratio"] == pytest.approx(300 / 290, abs=1e-4)
    assert found["process_2048_paged_over_default_ratio"] == pytest.approx(950 / 640, abs=1e-4)
    assert found["paged_2048_tokens_per_second"] == 40.0


def test_flex_figure_1_gives_the_share_of_k_and_v_in_the_peak() -> None:
    case = memory_values(50, 40)["flex_figure_2_paged_2048"]
    found = rows("flex_figure_1", {"flex_figure_1_2048": case})
    assert found == {"peak_2048_mib": 950.0, "incremental_2048_mib": 50.0, "kv_2048_mib": 45.0, "kv_2048_share": 0.0474}


def test_flex_figure_3_gives_growth_with_the_cache_and_per_doubling_without() -> None:
    cached = {"128": [0.01], "512": [0.012], "2048": [0.02]}
    recomputed = {"128": [0.1], "512": [0.5], "2048": [8.1]}
    case = {"seconds": {"cached": cached, "recomputed": recomputed}}
    found = rows("flex_figure_3", {"flex_figure_3_flex": case})
    assert found["flex_cached_growth_ratio"] == 2.0
    assert found["flex_recomputed_per_doubling_ratio"] == 3.0  # 81 times in 4 doublings
    assert found["flex_recomputed_512_ms"] == 500.0


def test_flex_figure_4_has_the_highest_ratio_of_all_lengths() -> None:
    seconds = {
        "paged": {"128": [0.01, 0.02], "256": [0.03, 0.03]},
        "default": {"128": [0.02, 0.04], "256": [0.04, 0.04]},
    }
    found = rows("flex_figure_4", {"flex_figure_4_cpu": {"seconds": seconds}})
    assert [found[f"cpu_paged_over_default_{length}_ratio"] for length in (128, 256)] == [0.5, 0.75]
    assert found["cpu_highest_paged_over_default_ratio"] == 0.75


def test_each_way_of_attention_is_measured_for_each_size() -> None:
    values = kernel_times.paged_and_contiguous([2], [16, 48], 1)
    assert list(values["seconds"]) == ["b2_c16", "b2_c48"]
    for seconds in values["seconds"].values():
        assert {way: len(times) for way, times in seconds.items()} == dict.fromkeys(
            ("paged", "in_order", "one_block", "sdpa"), 1
        )


def test_the_kernel_runs_with_each_block_size_and_names_the_packed_ones() -> None:
    values = kernel_times.by_block_size(2, 20, [1, 8, 16, 256], 1, 2)
    assert {size: len(times) for size, times in values["seconds"].items()} == dict.fromkeys(("1", "8", "16", "256"), 2)
    assert values["packed"] == [16, 256]


def test_larger_blocks_have_more_overhead_and_contiguous_memory_far_more() -> None:
    sizes = mixed_lengths.granted_slots([16, 64, 128], 32)["overheads"]["mixed"]
    overheads = [found["of_sequences"] for found in sizes.values()]
    assert overheads == sorted(overheads)
    assert overheads[0] < 0.02
    assert all(found["of_tokens"] > found["of_sequences"] for found in sizes.values())
    assert all(0.5 < found["contiguous"] < 3 for found in sizes.values())


def test_overhead_of_full_blocks_is_that_of_the_tokens_that_follow() -> None:
    """A prompt that fills its blocks grants one more for the first token that follows."""
    found = mixed_lengths._overheads([mixed_lengths.Lengths(256, 2)], 256)
    assert found["of_sequences"] == pytest.approx(0.99, abs=0.02)


@pytest.mark.parametrize("name", ["figure_18b_kernels", "flex_memory_overhead"])
def test_a_quick_run_gives_rows_and_a_picture(name: str) -> None:
    figure = FIGURES[name]
    values = measured(figure)
    assert all(row.value is not None and row.figure == name for row in figure.rows(values))
    assert all(axes.has_data() for axes in drawn(figure, values))


@pytest.mark.usefixtures("demo_model")
def test_a_sequence_is_swapped_out_and_in_and_recomputed_by_an_engine_for_each_block_size() -> None:
    values = recovery.recovery_seconds([16, 64], 80, 1)
    assert list(values["seconds"]) == ["16", "64"]
    for seconds in values["seconds"].values():
        assert {way: len(times) for way, times in seconds.items()} == {"swap_out": 1, "swap_in": 1, "recompute": 1}
        assert seconds["recompute"][0] > seconds["swap_out"][0] > 0


@pytest.mark.usefixtures("demo_model")
def test_the_peak_of_a_sequence_in_blocks_includes_its_blocks() -> None:
    values = peak_memory.paged_peak(64)
    assert values["kv_bytes"] == 4 * 16 * 30 * 2 * 3 * 64 * 2
    assert values["model_bytes"] > 256 * MIB
    assert values["peak_bytes"] - values["model_bytes"] >= values["kv_bytes"]
    assert len(values["seconds"]) == 32


def test_perplexity_is_of_all_scored_tokens() -> None:
    logprobs = {"in_blocks": [-3 * log(8), -3 * log(2)], "transformers": [-3 * log(4), -3 * log(5)]}
    perplexities = {way: perplexity(sums, 4) for way, sums in logprobs.items()}
    found = rows("flex_perplexity", {"flex_perplexity": {"perplexity": perplexities}})
    assert found["paged"] == pytest.approx(4)
    assert found["baseline"] == pytest.approx(20**0.5)
    assert found["relative_difference"] == pytest.approx(1 - 4 / 20**0.5)


@pytest.mark.usefixtures("demo_model")
def test_the_default_model_decodes_anew_after_its_last_tokens_are_removed() -> None:
    sequence = ContiguousSequence(ContiguousModel("float32"), range(100, 110))
    grown = sequence.kv_bytes // 10 * 13
    assert len(sequence.decode(3)) == 3
    assert sequence.kv_bytes == grown
    sequence.forget(3)
    sequence.decode(1)
    assert sequence.kv_bytes == grown // 13 * 11
