"""The benchmark of weights by form: its engines, their speed beside peers, and their distance from float32."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine.cpu import PeerSide, Program
from bench.report.pictures import draw
from bench.report.readme import Pages
from bench.report.results import Row
from bench.report.terms import Terms, UnequalTerms
from bench.weights import forms, memory, quality, speed, worker
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from tests.reference import greedy_reference, reference_logprobs

PLAIN = Terms(weights="bfloat16", activations="bfloat16", kv_cache="bfloat16", threads=2, work="")
FORMS = {
    "bf16": PLAIN,
    "int8": replace(PLAIN, weights="int8", activations="int8"),
    "int4": replace(PLAIN, weights="int4", activations="int8"),
    "int8_kv": replace(PLAIN, kv_cache="int8"),
}
LLAMACPP = replace(FORMS["int4"], kv_cache="float16")
PROMPTS = [[20 + number] * 9 for number in range(3)]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def parts(folder: Path) -> EngineParts:
    return assemble(EngineSettings(model=str(folder), dtype="float32", device_blocks=64, attention_backend="torch"))


class Float32:
    """The answers of an engine in this process, as of a worker."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts

    def measure(self, line: str) -> dict[str, Any]:
        return worker.answer(self.parts, {}, json.loads(line))


def test_an_engine_scores_texts_and_continues_prompts_as_transformers_does(folder: Path, parts: EngineParts) -> None:
    scored = worker.answer(parts, {}, {"score": PROMPTS})["logprobs"]
    for text, logprobs in zip(PROMPTS, scored, strict=True):
        expected = reference_logprobs(folder, text).gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    continued = worker.answer(parts, {}, {"continue": PROMPTS})["tokens"]
    assert continued == greedy_reference(folder, PROMPTS, worker.NEW_TOKENS)
    with pytest.raises(ValueError, match="unknown work: answer"):
        worker.answer(parts, {}, {"answer": 1})


def test_an_engine_agrees_with_itself_in_all_tokens_and_log_probabilities(parts: EngineParts) -> None:
    engine: Any = Float32(parts)
    windows = [list(range(20, 20 + 2 * quality.PROMPT_TOKENS))]
    reference = quality.reference_of(engine, windows)
    assert [len(one) for one in reference.prompts] == [quality.PROMPT_TOKENS] * 2
    assert [len(one) for one in reference.logprobs] == [worker.NEW_TOKENS] * 2
    found = quality.measured(engine, windows, reference)
    found["differences"] = quality.differences_of(engine, reference, found["tokens"])
    values = {one.metric: one.value for one in quality.rows_of("float32", found, reference, {})}
    assert values["float32_greedy_agreement"] == 1
    assert values["float32_first_differences"] == 0
    assert values["float32_largest_logprob_error"] == pytest.approx(0, abs=1e-4)


def test_a_difference_has_its_place_and_how_much_less_float32_gives_its_token(folder: Path, parts: EngineParts) -> None:
    engine: Any = Float32(parts)
    reference = quality.reference_of(engine, [PROMPTS[0] * 8])
    other = list(reference.tokens[0])
    other[5] += 1
    (found, *_) = quality.differences_of(engine, reference, [other, *reference.tokens[1:]])
    assert found is not None
    assert (found.place, found.token) == (5, other[5])
    row = reference_logprobs(folder, [*reference.prompts[0], *other[:6]])[-1]
    assert found.gap == pytest.approx(float(row.max() - row[other[5]]), abs=1e-4)


def test_rows_of_quality_count_tokens_before_the_first_difference_near_ties_and_errors() -> None:
    reference = quality.Reference([[1], [1], [1]], [[4] * 10] * 3, [[-1.0] * 10] * 3)
    found = {
        "windows": [[-1.0, -2.0]],
        "logprobs": [[-1.0] * 10, [-1.0] * 10, [-1.0] * 9 + [-1.6]],
        "differences": [None, quality.Difference(4, 5, 0.05), quality.Difference(1, 5, 0.2)],
    }
    values = {one.metric.removeprefix("int8_"): one.value for one in quality.rows_of("int8", found, reference, FORMS)}
    assert values == {
        "perplexity": pytest.approx(math.exp(1.5), abs=1e-4),
        "greedy_agreement": 0.5,
        "first_differences": 2,
        "near_ties": 1,
        "mean_logprob_error": 0.02,
        "largest_logprob_error": 0.6,
    }


def test_perplexities_are_compared_with_bfloat16_and_with_llamacpp_if_it_ran() -> None:
    found = {"bf16": -1.0, "int8": -1.001, "int8_kv": -0.99, "int4": -1.5}
    windows = {form: [[logprob, logprob], [logprob]] for form, logprob in found.items()}
    theirs = quality.Scored([[-1.6, -1.5], [-1.7]], "llama.cpp", LLAMACPP)
    ran = {one.metric: one for one in quality.comparisons(windows, theirs, FORMS)}
    assert ran["int8_perplexity_difference"].met is True
    assert ran["int8_kv_perplexity_difference"].value == pytest.approx(1 - math.exp(-0.01), abs=1e-6)
    assert ran["int8_kv_perplexity_difference"].met is False
    assert ran["int8_kv_perplexity_difference_standard_error"].value == pytest.approx(0, abs=1e-6)
    assert ran["int4_perplexity_over_llamacpp_as_users_run_it"].met is True
    assert set(ran["int4_perplexity_over_llamacpp_as_users_run_it"].terms) == {"int4", "llamacpp"}
    error = math.exp(-0.1) * 0.1 / math.sqrt(3)
    assert ran["int4_perplexity_over_llamacpp_as_users_run_it_standard_error"].value == pytest.approx(error, abs=1e-6)
    missing = {
        one.metric: one for one in quality.comparisons(windows, quality.Scored(None, "llama.cpp did not run", None), {})
    }
    ratio = missing["int4_perplexity_over_llamacpp_as_users_run_it"]
    assert (ratio.value, ratio.met, ratio.peer) == (None, False, "llama.cpp did not run")


def test_log_probabilities_are_read_from_a_file_of_logits(tmp_path: Path) -> None:
    logits = torch.randn(5, 7)
    (tmp_path / "logits").write_bytes(logits.numpy().tobytes())
    expected = [float(logits[at].log_softmax(dim=-1)[token]) for at, token in enumerate([3, 1, 6, 0])]
    assert quality._logprobs(tmp_path / "logits", 7, [2, 3, 1, 6, 0]) == pytest.approx(expected)


# Each engine answers with its settings; those of the 4-bit file find no kernels.
ENGINE = """
import json, sys
settings, works = json.loads(sys.argv[1]), json.loads(sys.stdin.readline())
formats = {"bf16": "bfloat16", "int8": "int8"}
name = "float32" if settings["dtype"] == "float32" else formats.get(settings["weights"], FORMAT)
print(json.dumps({"name": name}), flush=True)
for line in sys.stdin:
    print(json.dumps({"seconds": works[json.loads(line)["run"]]}), flush=True)
"""


def test_each_form_has_an_engine_whose_weights_have_its_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "engine.py"
    monkeypatch.setattr(forms, "COMMAND", (sys.executable, str(script)))
    script.write_text(ENGINE.replace("FORMAT", "'Q4_1'"))
    works: Any = {"b1": 1.5}
    with forms.FormWorkers(works) as workers:
        assert {workers.program(form)("b1")[0] for form in forms.FORMS} == {1.5}
        assert workers.terms()["int4"] == Terms(work="")
        workers.keep(("int8",))
        assert workers.program("int8")("b1")[0] == 1.5
        with pytest.raises(KeyError):
            workers.program("bf16")("b1")
    script.write_text(ENGINE.replace("FORMAT", "'bfloat16'"))
    with pytest.raises(RuntimeError, match="int4: the weights of the engine are bfloat16, not Q4_1"):
        forms.FormWorkers(works)


def test_programs_take_turns_and_slow_peers_are_left_out_of_large_batches() -> None:
    calls: list[str] = []
    spent = {"int4": 1.0, "fast": 0.5, "slow": 1.1}

    def program(label: str) -> Program:
        def run(name: str) -> tuple[float, float] | None:
            calls.append(f"{label} {name}")
            return None if label == "missing" else (spent[label], 2.0)

        return run

    programs = {label: program(label) for label in (*spent, "missing")}
    least = {name: {"int4_ceiling": 0.5} for name in speed.WORKLOADS}
    found = speed.measured(programs, ["fast", "slow", "missing"], lambda: least, 2)
    of_b1 = [call.removesuffix(" b1") for call in calls if call.endswith(" b1")]
    assert of_b1[:4] != of_b1[4:]
    assert found.slow == {"slow": 2.2}
    assert found.seconds["b1"] == {"fast": [0.5] * 2, "slow": [1.1] * 2, "int4": [1.0] * 2, "int4_ceiling": [0.5] * 2}
    assert all(set(found.seconds[name]) == {"int4", "fast", "int4_ceiling"} for name in speed.LARGE)
    assert found.cores["b1"]["int4"] == [2.0, 2.0]


SECONDS = {
    "bf16": [2.0] * 5,
    "int8": [1.0] * 5,
    "int4": [0.5] * 5,
    "again": [0.5] * 5,
    "bf16_ceiling": [1.0] * 5,
    "int8_ceiling": [0.5] * 5,
    "int4_ceiling": [0.4] * 5,
    "openvino_int8": [1.1] * 5,
    "openvino_int4": [0.7] * 5,
    "llamacpp": [0.6] * 5,
    "vllm": [2.5] * 5,
}
PEERS = {
    "openvino_int8": FORMS["int8"],
    "openvino_int4": replace(FORMS["int4"], kv_cache="int8"),
    "llamacpp": LLAMACPP,
    "vllm": PLAIN,
}


def rows(slow: dict[str, float] | None = None, workload: str = "b1", **missing: str) -> dict[str, Row]:
    """Return the rows of a workload, by metric; the missing peers did not run."""
    sides = {label: PeerSide(None if label in missing else PEERS[label], missing.get(label, label)) for label in PEERS}
    ran = {label: one for label, one in SECONDS.items() if label not in missing and label not in (slow or {})}
    speeds = speed.Speeds(slow=slow or {})
    speeds.seconds[workload] = ran
    return {one.metric: one for one in speed.rows_of(speeds, {one: FORMS[one] for one in speed.COMPARED}, sides)}


def test_a_goal_is_the_nearer_of_the_better_peer_and_the_ceiling() -> None:
    found = rows()
    assert found["int8_b1_over_bf16"].value == 2
    assert found["int8_b1_over_the_best_peer_as_users_run_it"].value == 1.1
    assert found["int8_b1_of_its_goal_as_users_run_it"].value == pytest.approx(1.1 / 1.2, abs=1e-3)
    assert found["int8_b1_of_its_goal_as_users_run_it"].met is False
    assert found["int4_b1_over_the_best_peer_as_users_run_it"].value == 1.2
    goal = found["int4_b1_of_its_goal_as_users_run_it"]
    assert (goal.value, goal.met) == (1.0, True)
    assert goal.peer == "openvino_int4 or openvino_int8 or llamacpp or vllm"
    assert goal.by == "1.2 of the peer, wanted 1.2; 0.8 of the ceiling, wanted 0.85: through the peer"
    assert set(goal.terms) == {"int4", "openvino_int4", "openvino_int8", "llamacpp", "vllm"}
    assert goal.null == (1.0, 1.0)
    assert found["int4_b1_of_the_ceiling"].limit
    assert found["bf16_b1_tokens_per_second"].value == 32


def test_first_tokens_are_compared_with_openvino_in_as_many_bits() -> None:
    found = rows(workload="first_token_1024")
    eight, four = (found[f"{form}_first_token_1024_over_openvino_as_users_run_it"] for form in ("int8", "int4"))
    assert (eight.value, eight.peer, eight.met) == (1.1, "openvino_int8", False)
    assert (four.value, four.peer, four.met) == (1.4, "openvino_int4", True)
    assert set(four.terms) == {"int4", "openvino_int4"}
    assert not any("over_openvino" in metric for metric in rows())


def test_rows_of_a_missing_peer_have_no_value_and_are_not_met() -> None:
    found = rows(llamacpp="llamacpp did not run: LLAMACPP_MODEL is not set")
    for metric in ("int4_b1_over_the_best_peer_as_users_run_it", "int4_b1_of_its_goal_as_users_run_it"):
        assert (found[metric].value, found[metric].met or False) == (None, False)
        assert found[metric].peer == "llamacpp did not run: LLAMACPP_MODEL is not set"
    assert found["int4_b1_of_the_ceiling"].value == 0.8
    assert found["int4_b1_over_bf16"].met is True
    assert found["int8_b1_of_its_goal_as_users_run_it"].value is not None


def test_a_peer_that_is_too_slow_for_a_workload_is_named_with_how_slow_it_is() -> None:
    found = rows(slow={"llamacpp": 4.0})
    own = found["llamacpp_b1_tokens_per_second"]
    assert own.value is None
    assert own.peer == "llamacpp, not run: 4.0 times the seconds of the fastest peer with 8 requests"
    assert found["int4_b1_over_the_best_peer_as_users_run_it"].value == 1.4


def test_forms_that_differ_in_more_than_their_names_state_are_refused() -> None:
    speeds = speed.Speeds()
    speeds.seconds["b1"] = SECONDS
    forms = {one: FORMS[one] for one in speed.COMPARED}
    sides = {label: PeerSide(terms, label) for label, terms in PEERS.items()}
    with pytest.raises(UnequalTerms, match="int8_b1_over_bf16: threads is 1"):
        speed.rows_of(speeds, forms | {"int8": replace(FORMS["int8"], threads=1)}, sides)


def test_memory_beyond_the_file_and_the_pool_is_of_the_resident_set(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(7))
    assert memory.file_bytes(tmp_path) == 7
    (tmp_path / "model.gguf").write_bytes(bytes(5))
    assert memory.file_bytes(tmp_path) == 5
    used = {"resident": 900_000_000, "proportional": 800_000_000, "file": 100_000_000, "pool": 400_000_000}
    *_, beyond = memory.rows_of(used, FORMS["int4"])
    assert (beyond.value, beyond.unit, beyond.met) == (400.0, "MB", False)


def test_the_table_of_forms_has_a_line_for_each_measured_form_and_peer(tmp_path: Path) -> None:
    assert Pages(tmp_path).block("formats") == "Not measured yet: `make bench-weights`."
    metrics = {
        "int8_b1_tokens_per_second": (200.4, None),
        "int8_first_token_1024_ms": (301.6, None),
        "int8_perplexity": (15.1234, None),
        "int8_greedy_agreement": (0.875, "float32"),
        "llamacpp_b1_tokens_per_second": (150.0, "llama.cpp 1"),
        "openvino_int8_b1_tokens_per_second": (None, "-"),
        "int4_b1_over_the_best_peer_as_users_run_it": (1.234, "llama.cpp 1"),
    }
    found = [{"metric": metric, "value": value, "peer": peer} for metric, (value, peer) in metrics.items()]
    (tmp_path / "amx").mkdir()
    (tmp_path / "amx" / "weights.json").write_text(json.dumps({"rows": found}))
    assert Pages(tmp_path).block("formats").splitlines()[2:] == [
        "| amx | int8, a scale for each output | 200 | - | 302 ms | 15.123 | 87.5% | - | - |",
        "| amx | llama.cpp 1, the same file | 150 | - | - | - | - | - | - |",
        "| amx | 4 bits over the best peer, as users run them | 1.23 times | - | - | - | - | - | - |",
    ]


def test_forms_and_the_peers_that_ran_are_drawn(tmp_path: Path) -> None:
    seconds = {
        name: {one: spent for one, spent in SECONDS.items() if one != "llamacpp" or name not in speed.LARGE}
        for name in speed.WORKLOADS
    }
    sides = {label: PeerSide(terms, label) for label, terms in PEERS.items()}
    made = speed.rows_of(
        speed.Speeds(seconds, slow={"llamacpp": 4.0}), {one: FORMS[one] for one in speed.COMPARED}, sides
    )
    found = [{"metric": one.metric, "value": one.value} for one in made]
    (tmp_path / "amx").mkdir()
    (tmp_path / "amx" / "weights.json").write_text(json.dumps({"rows": found, "seconds": seconds}))
    picture = draw("weights", tmp_path, tmp_path)
    assert picture is not None
    assert picture.stat().st_size > 5_000
