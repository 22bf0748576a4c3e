"""The benchmark of the engine on the CPU: its rows, and what it refuses."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bench.engine import cpu
from bench.engine.cpu import PeerSide
from bench.loads.ceiling import MachineLimits, ModelCosts
from bench.report.results import Row
from bench.report.terms import Terms, UnequalTerms

OURS = Terms(weights="bfloat16", activations="bfloat16", kv_cache="bfloat16", threads=2, work="")
SECONDS = {
    "quire": [1.0] * 5,
    "again": [1.0, 1.01, 1.0, 0.99, 1.0],
    "openvino": [1.5] * 5,
    "vllm": [1.3] * 5,
    "ceiling": [0.8] * 5,
}
SIDES = {"openvino": PeerSide(OURS, "openvino-genai 1"), "vllm": PeerSide(OURS, "vLLM 1")}


def rows(seconds: Mapping[str, list[float]] = SECONDS, sides: Mapping[str, PeerSide] = SIDES) -> dict[str, Row]:
    return {one.metric: one for one in cpu.workload_rows("b8", seconds, OURS, sides)}


def test_a_workload_is_compared_with_each_peer_the_better_one_and_the_ceiling() -> None:
    found = rows()
    assert found["b8_quire_tokens_per_second"].value == 8 * 64
    assert found["b8_over_openvino"].value == 1.5
    assert found["b8_over_the_better_peer"].value == 1.3
    assert found["b8_of_the_ceiling"].value == 0.8
    goal = found["b8_of_its_goal"]
    assert (goal.value, goal.met, goal.null) == (round(1.3 / 1.2, 3), True, (0.9901, 1.0101))
    assert goal.by == "1.3 of the peer, wanted 1.2; 0.8 of the ceiling, wanted 0.85: through the peer"
    assert goal.terms["vllm"] == replace(OURS, work="b8")


@pytest.mark.parametrize(
    "unequal", [{"weights": "int4"}, {"activations": "float32"}, {"kv_cache": "int8"}, {"threads": 1}]
)
def test_a_peer_on_other_terms_is_refused(unequal: dict[str, object]) -> None:
    with pytest.raises(UnequalTerms, match="b8_over_vllm"):
        rows(sides=SIDES | {"vllm": PeerSide(replace(OURS, **unequal), "vLLM 1")})  # type: ignore[arg-type]


def test_without_one_of_the_peers_there_is_no_better_one() -> None:
    missing = "openvino did not run: OPENVINO_MODEL is not set"
    seconds = {label: spent for label, spent in SECONDS.items() if label != "openvino"}
    found = rows(seconds, SIDES | {"openvino": PeerSide(None, missing)})
    for metric in ("b8_openvino_tokens_per_second", "b8_over_openvino", "b8_over_the_better_peer", "b8_of_its_goal"):
        assert (found[metric].value, found[metric].peer, found[metric].met or False) == (None, missing, False)
    assert found["b8_over_vllm"].value == 1.3
    assert found["b8_of_the_ceiling"].value == 0.8


def test_the_better_peer_is_among_those_of_the_class() -> None:
    left_out = PeerSide(None, "openvino did not run: it has no products in bfloat16 for avx2", left_out=True)
    seconds = {label: spent for label, spent in SECONDS.items() if label != "openvino"}
    better = rows(seconds, SIDES | {"openvino": left_out})["b8_over_the_better_peer"]
    assert (better.value, better.peer) == (1.3, "vLLM 1")


def test_nothing_is_reached_through_a_ceiling_that_was_exceeded() -> None:
    found = rows(SECONDS | {"ceiling": [1.1] * 5})
    assert found["b8_of_the_ceiling"].reason == "void: above a physical limit"
    assert found["b8_of_its_goal"].by is not None
    assert found["b8_of_its_goal"].by.endswith("through the peer")


def test_programs_run_in_turn_and_the_repetition_that_warms_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def program(label: str) -> cpu.Program:
        def run(name: str) -> tuple[float, float | None] | None:
            calls.append(label)
            return None if label == "missing" else (float(len(calls)), 2.0)

        return run

    monkeypatch.setattr(cpu, "WORKLOADS", {"b1": ((3,), 2)})
    programs = {label: program(label) for label in ("quire", "again", "missing")}
    run = cpu.measured(programs, ModelCosts(1, 1, 1, 1), lambda: MachineLimits(1.0, 1.0), 3)
    assert set(calls[:9:3]) == {"quire", "again", "missing"}
    assert {label: len(one) for label, one in run.seconds["b1"].items()} == {"quire": 3, "again": 3, "ceiling": 3}
    assert run.cores["b1"]["quire"] == [2.0] * 3
    assert len(run.limits) == 3


def test_ratios_with_a_target_of_a_class_of_cpus_are_repeated_under_its_name() -> None:
    found = list(rows().values())
    (peer,) = cpu.of_class("avx512-bf16", found)
    assert (peer.metric, peer.value, peer.target, peer.met) == ("avx512_bf16_b8_over_the_better_peer", 1.3, 1.1, True)
    first = [replace(one, metric=one.metric.replace("b8", "first_token_128"), value=0.8) for one in found]
    (ceiling,) = cpu.of_class("avx2", first)
    assert (ceiling.metric, ceiling.target, ceiling.met) == ("avx2_first_token_128_of_the_ceiling", 0.9, False)
    assert cpu.of_class("amx", found) == []
