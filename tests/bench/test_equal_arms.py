"""Benchmarks of our own arms: what they compare ran on equal terms, and beside an arm that ran twice."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.blocks import copies, kv, kv_engine, waste
from bench.loads import engine_worker
from bench.loads.memory import DATA_VARIABLE, DataMissing, lengths_of, paper_lengths
from bench.report.results import Row
from bench.report.terms import Terms, UnequalTerms
from bench.serving import batch, overhead, system

OURS = Terms(weights="bfloat16", activations="bfloat16", kv_cache="bfloat16", threads=2, work="B=16")
ROLES = dict.fromkeys(system.ROLES, 0.5) | {"wall_seconds": 2.0}


def of_engine(terms: dict[str, Terms]) -> list[Row]:
    run = {"tokens_per_second": 100.0, "cpu_us_per_token": 50.0, "left_out_share": 0.0, "waiting_share": 0.01}
    return kv_engine.rows_of([dict.fromkeys(kv_engine.ARMS, run)], terms)


def of_system(terms: dict[str, Terms]) -> list[Row]:
    run = {key: {"seconds": 2.0, "cpu_seconds": 3.0} for key in system.ARMS}
    return system.rows_of([run | {f"services_meanwhile_{name}": ROLES for name in system.ARMS}], terms)


def of_batch(terms: dict[str, Terms]) -> list[Row]:
    return batch.rows_of([{key: {"seconds": 2.0, "cpu_seconds": 3.0} for key in batch.ARMS}], terms)


def of_copies(terms: dict[str, Terms]) -> list[Row]:
    ways = ("one_large_copy", "copy", "one_large_copy_again", "copy_again")
    return copies.rows_of({key: [1.0] for key in ways}, terms["copy"], terms["one_large_copy"])


def of_kv(terms: dict[str, Terms]) -> list[Row]:
    run = dict.fromkeys(kv.COMPARED, 1.0)
    return kv.in_process_rows({"quire": [run], "again": [run], "vllm": [run]}, "vLLM 1.0", {"vllm": terms["vllm"]})


CASES: list[tuple[Callable[[dict[str, Terms]], list[Row]], Sequence[str], Terms]] = [
    (of_engine, tuple(kv_engine.ARMS), OURS),
    (of_system, ("system", "in_process"), OURS),
    (of_batch, ("batch", "in_process"), OURS),
    (of_copies, ("copy", "one_large_copy"), OURS),
    (of_kv, ("vllm",), kv.IN_PROCESS),
]


@pytest.mark.parametrize(("rows_of", "arms", "terms"), CASES)
@pytest.mark.parametrize("inequality", [{"weights": "int4"}, {"threads": 8}])
def test_arms_that_ran_on_other_terms_are_not_compared(
    rows_of: Callable[[dict[str, Terms]], list[Row]],
    arms: Sequence[str],
    terms: Terms,
    inequality: dict[str, Any],
) -> None:
    sides = dict.fromkeys(arms, terms)
    assert any(row.null for row in rows_of(sides) if len(row.terms) == 2)
    with pytest.raises(UnequalTerms):
        rows_of(sides | {arms[-1]: replace(terms, **inequality)})


def test_the_whole_system_is_compared_with_one_process_because_its_row_says_so() -> None:
    rows = of_system({"system": replace(OURS, processes=3), "in_process": OURS})
    (compared,) = (row for row in rows if row.metric == "over_in_process")
    assert (compared.value, compared.null) == (1.0, (1.0, 1.0))


def test_costs_over_grpc_are_ratios_beside_the_interval_of_equal_arms() -> None:
    def run(cpu: float) -> dict[str, float]:
        return {"tokens_per_second": 100.0, "cpu_us_per_token": cpu, "left_out_share": 0.0, "waiting_share": 0.0}

    runs = [
        {"in_process": run(100), "over_grpc": run(one), "again": run(102), "one_ms_added": run(103)}
        for one in (101.0, 102.0, 103.0)
    ]
    rows = {row.metric: row for row in kv_engine.rows_of(runs, dict.fromkeys(kv_engine.ARMS, OURS))}
    compared = rows["over_grpc_cpu_time_over_in_process"]
    assert compared.value == 1.02
    assert compared.null == (0.9902, 1.0098)
    assert compared.met is False
    assert compared.reason is not None
    assert compared.reason.startswith("undecided")


def test_overhead_beside_an_earlier_commit_has_its_null_interval() -> None:
    used = {"gateway": 1.0, "engine": 1.0, "kvmanager": 0.5, "client": 9.0}
    runs = {name: {streams: [used] for streams in overhead.NEW_TOKENS} for name in ("quire", "again", "earlier")}
    rows = {row.metric: row for row in overhead.rows_of(runs, "0123abc")}
    assert (rows["over_earlier_32"].value, rows["over_earlier_32"].null) == (1.0, (1.0, 1.0))
    assert rows["over_earlier_32"].terms.keys() == {"quire", "earlier"}
    runs.pop("earlier")
    assert {row.metric: row for row in overhead.rows_of(runs, None)}["over_earlier_32"].value is None


def test_kept_alive_answers_are_compared_with_those_of_an_earlier_commit() -> None:
    answers = {"quire": [0.9, 0.9], "again": [0.9, 0.9], "earlier": [1.0, 1.0]}
    rows = {row.metric: row for row in overhead.answer_rows(answers, "0123abc")}
    assert rows["gateway_us_per_kept_alive_answer"].value == 0.9e6 / overhead.ANSWERS
    assert (rows["kept_alive_answer_over_earlier"].value, rows["kept_alive_answer_over_earlier"].met) == (0.9, True)
    answers.pop("earlier")
    missing = {row.metric: row for row in overhead.answer_rows(answers, None)}["kept_alive_answer_over_earlier"]
    assert (missing.value, missing.met) == (None, False)


def test_formats_that_an_engine_logs_are_its_terms() -> None:
    log = "loading\ndemo runs in bfloat16 with weights in Q4_1 and a KV cache in int8\nready"
    terms = engine_worker.model_terms(*engine_worker.formats_logged(log), work="", threads=2, processes=1)
    assert (terms.weights, terms.activations, terms.kv_cache) == ("int4", "int8", "int8")
    log = log.replace("Q4_1", "bfloat16").replace("int8", "bfloat16")
    assert batch.terms_of_log(log) == replace(OURS, work=batch.WORK, threads=batch.THREADS)


@pytest.mark.parametrize(
    ("named", "numbers"),
    [
        ("gptq int4 g64 act-order", "int4"),
        ("compressed-tensors w8a16", "int8"),
        ("compressed-tensors mxfp4", "mxfp4"),
        ("Q8_0", "int8"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_published_formats_are_compared_by_the_numbers_that_they_have(named: str, numbers: str) -> None:
    log = f"demo runs in bfloat16 with weights in {named} and a KV cache in bfloat16"
    terms = engine_worker.model_terms(*engine_worker.formats_logged(log), work="", threads=2, processes=1)
    assert terms.weights == numbers


def test_what_does_not_repeat_exactly_is_not_published_as_exact() -> None:
    preemptions = iter((3, 3, 3, 4))

    def serve() -> tuple[waste.SlotShares, int]:
        return waste.SlotShares([(1.0,)], [0.5]), next(preemptions)

    assert waste.repeated_exactly(serve)[1] == 3
    with pytest.raises(AssertionError, match="served in another way"):
        waste.repeated_exactly(serve)


def test_empty_pairs_and_long_conversations_are_left_out_of_the_papers_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [(100, 50), (0, 5), (5, 0), (2000, 49), (2000, 48)]
    lines = ["prompt_tokens,output_tokens", *(f"{prompt},{output}" for prompt, output in pairs)]
    (tmp_path / "sharegpt_opt_lengths.csv").write_text("\n".join(lines))
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert sorted(paper_lengths(2)) == [(100, 50), (2000, 48)]
    assert (1, 5) in lengths_of("sharegpt_opt_lengths.csv", "prompt_tokens", "output_tokens")
    monkeypatch.delenv(DATA_VARIABLE)
    with pytest.raises(DataMissing, match="sharegpt_opt_lengths"):
        paper_lengths(2)
