"""Durations of steps: by hand for each term, and what is refused."""

import pytest

from bench.papers.simulation.cost_model import (
    InvalidCostModel,
    MeasuredFit,
    Placement,
    Shape,
    StepLoad,
    fit_of,
    place,
    roofline_of,
    transfers_of,
)

OPT_13B = place("opt-13b", "a100-40g")
DECODING = StepLoad(30, 15_000, 0, 0)


def test_a_fit_adds_the_terms_of_prompts_and_decoding() -> None:
    fit = MeasuredFit(20.0, 0.1, 1e-5, 25.0, 0.001, 0.05)
    assert fit.seconds(DECODING) == pytest.approx((25 + 15 + 1.5) / 1000)
    assert fit.seconds(StepLoad(0, 0, 500, 500**2)) == pytest.approx((20 + 50 + 2.5) / 1000)
    assert fit.seconds(StepLoad(30, 15_000, 500, 500**2)) == pytest.approx((25 + 15 + 1.5 + 50 + 2.5) / 1000)


def test_decoding_of_95_sequences_and_more_has_a_fit_of_its_own() -> None:
    """The coefficients of the source times 1.2, moved to the bandwidth of 40 GB."""
    small, large = (StepLoad(batch, 8_000, 0, 0) for batch in (94, 95))
    there = fit_of("opt-13b", "a100-80g")
    assert there.seconds(small) == pytest.approx(1.2e-3 * (19.563 + 0.000494 * 8_000 + 0.0506 * 94), rel=1e-3)
    assert there.seconds(large) == pytest.approx(1.2e-3 * (16.839 + 0.000439 * 8_000 + 0.14 * 95), rel=1e-3)
    moved = fit_of("opt-13b", "a100-40g").seconds(large)
    assert moved - there.seconds(large) == pytest.approx(3.97e-3 + 8_000 * 0.000527e-3 * (2.039 / 1.555 - 1), rel=1e-2)


def test_four_ranks_of_opt_66b_have_the_large_fit_of_their_source() -> None:
    seconds = fit_of("opt-66b", "a100-80g", 4).seconds(StepLoad(120, 9_000, 0, 0))
    assert seconds == pytest.approx(1.2e-3 * (34.05 + 0.000355 * 9_000 + 0.1626 * 120), rel=1e-3)


def test_a_fit_moved_to_slower_memory_reads_weights_and_context_at_its_bandwidth() -> None:
    """26 GB of weights at 1.555 instead of 2.039 TB/s take 4.0 ms more."""
    there, here = fit_of("opt-13b", "a100-80g"), fit_of("opt-13b", "a100-40g")
    assert here.decode - there.decode == pytest.approx(3.97, abs=0.01)
    assert here.decode_context / there.decode_context == pytest.approx(2.039 / 1.555)
    assert here.prefill_token == there.prefill_token


def test_a_token_of_opt_13b_has_800_kib_of_k_and_v() -> None:
    assert OPT_13B.shape.token_bytes == 800 * 1024


def test_a_roofline_reads_weights_and_context_while_few_tokens_are_computed() -> None:
    model = roofline_of(OPT_13B, "low")
    weights = 26e9 / (0.85 * 1.555e12)
    context = 15_000 * 819_200 / (0.68 * 1.555e12)
    assert model.seconds(DECODING) == pytest.approx(0.008 + 30 * 0.03e-3 + weights + context)


def test_a_roofline_of_long_prompts_is_bound_by_products() -> None:
    model = roofline_of(OPT_13B, "low")
    products = 2 * 13e9 * 2_000 / (0.55 * 312e12)
    scores = 4 * 40 * 5120 * 2_000**2 / 2 / (0.55 * 312e12)
    assert model.seconds(StepLoad(0, 0, 2_000, 2_000**2)) == pytest.approx(0.008 + products + scores)


def test_ranks_divide_the_work_and_add_all_reduces() -> None:
    one, eight = Shape(2, 64, 8, 8e9), Shape(2, 64, 8, 8e9)
    device = place("opt-13b", "a100-80g").device
    alone, shared = (roofline_of(Placement(shape, device, ranks)) for shape, ranks in ((one, 1), (eight, 8)))
    reduced = 2 * 2 * (0.03e-3 + 2 * 64 * 4 / 235e9)
    fixed = 0.009 + 4 * 0.045e-3
    load = StepLoad(4, 1_000, 0, 0)
    assert shared.seconds(load) - fixed - reduced == pytest.approx((alone.seconds(load) - fixed) / 8)


@pytest.mark.parametrize("one_piece", [True, False])
def test_a_swapped_block_takes_its_bytes_over_pcie_and_the_launch_of_its_copies(one_piece: bool) -> None:
    transfers = transfers_of(OPT_13B, 16, one_piece=one_piece)
    bytes_seconds, copies = 16 * 819_200 / 25e9, 1 if one_piece else 80
    assert transfers.seconds(StepLoad(0, 0, 0, 0, swapped_blocks=3)) == pytest.approx(
        3 * (bytes_seconds + copies * 1e-5)
    )


def test_a_step_with_copies_only_takes_their_time() -> None:
    load = StepLoad(0, 0, 0, 0, copied_blocks=5)
    for model in (
        fit_of("opt-13b", "a100-40g", transfers=transfers_of(OPT_13B, 16)),
        roofline_of(OPT_13B, transfers=transfers_of(OPT_13B, 16)),
    ):
        assert model.seconds(load) == pytest.approx(5 * 2 * 16 * 819_200 / 1.555e12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: place("opt-1t", "a100-40g"), "no models entry 'opt-1t'.*opt-13b"),
        (lambda: place("opt-13b", "tpu"), "no devices entry 'tpu'.*a100-40g"),
        (lambda: fit_of("opt-175b", "a100-80g", 8), "no steps of opt-175b on 8 ranks were measured"),
        (lambda: fit_of("opt-13b", "a100-40g", 2), "on 2 ranks were measured, but of opt-13b on 1, opt-66b on 4"),
        (lambda: roofline_of(OPT_13B, "best"), "no roofline entry 'best'.*middle"),
        (lambda: place("opt-66b", "a100-40g"), "weights take 132.0 GB of each of 1 devices, which have 42.9 GB"),
        (lambda: place("opt-13b", "a100-40g", 3), "ranks must be a divisor of the 40 heads, not 3"),
        (lambda: place("opt-13b", "a100-40g", 0), "ranks must be a divisor of the 40 heads, not 0"),
        (lambda: Shape(2, 65, 8, 1e9), "hidden must be a multiple of heads"),
        (lambda: Shape(0, 64, 8, 1e9), "layers must be above 0, not 0"),
        (lambda: Shape(2, 64, 8, float("nan")), "parameter_bytes must be above 0, not nan"),
    ],
)
def test_unknown_names_and_impossible_shapes_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidCostModel, match=message):
        make()
