"""The rows of the benchmark of routers."""

from bench.serving.routers import ARMS, HitRates, rows_of

RATES = {
    "gateway": (0.8, 0.9),
    "again": (0.8, 0.9),
    "round_robin": (0.5, 0.5),
    "smg": (0.85, 0.85),
    "vllm_router": (0.4, 0.4),
}


def test_other_routers_are_compared_with_the_gateways_hit_rate() -> None:
    outcomes = {name: [HitRates(rate, [rate, rate], failed=1) for rate in RATES[name]] for name in ARMS}
    values = {one.metric: one.value for one in rows_of(outcomes)}
    assert values["gateway_hit_rate"] == 0.85
    assert values["smg_over_gateway"] == 1.0
    assert values["vllm_router_over_gateway"] == round(0.4 / 0.85, 4)
    assert values["smg_failed_requests"] == 2


def test_only_a_router_within_5_percent_meets_its_target() -> None:
    outcomes = {name: [HitRates(rate, [rate, rate], failed=0) for rate in RATES[name]] for name in ARMS}
    targets = {one.metric: (one.value or 0) >= one.target for one in rows_of(outcomes) if one.target is not None}
    assert targets == {"smg_over_gateway": True, "vllm_router_over_gateway": False}
