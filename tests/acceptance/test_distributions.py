"""The distribution of 20,000 sampled tokens equals that of transformers' logits processors."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.v1 import decoding_pb2, gateway_pb2
from tests.acceptance.conftest import Record
from tests.engine.run.chi_square import chi_square_is_likely
from tests.load import run_streams
from tests.reference import reference_model
from tests.running_quire import RunningQuire, start_quire

DRAWS = 20_000
SAMPLES = 125  # per request
PROMPT = (40, 41, 42, 40, 57, 300)
BIAS = {57: 4.0, 90: -3.0}

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.5},
    "top_k": {"temperature": 3.0, "top_k": 20},
    "top_p": {"temperature": 2.0, "top_p": 0.9},
    "min_p": {"temperature": 3.0, "min_p": 0.05},
    "all of them": {"temperature": 3.5, "top_k": 60, "top_p": 0.95, "min_p": 0.01},
}


@pytest.fixture(scope="module")
def wide_quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    one = start_quire("--model", str(tiny_model("llama")), "--device-blocks", "600", "--max-sequences", "256")
    yield one
    one.close()


@pytest.mark.parametrize("with_rules", [False, True], ids=["plain", "after rules"])
@pytest.mark.parametrize("case", CASES)
def test_20000_draws_have_the_distribution_of_transformers(
    wide_quire: RunningQuire, tiny_model: Callable[[str], Path], record: Record, case: str, with_rules: bool
) -> None:
    requests = (_request(seed, CASES[case], with_rules) for seed in range(DRAWS // SAMPLES))
    answers = run_streams(wide_quire, requests, 4)
    counts = Counter(token for answer in answers for token in answer.token_ids)
    assert counts.total() == DRAWS
    chances = _chances(tiny_model("llama"), CASES[case], with_rules)
    record(draws=DRAWS, tokens_seen=len(counts), tokens_possible=sum(chance > 0 for chance in chances))
    assert chi_square_is_likely(counts, chances)


def _request(seed: int, sampling: dict[str, Any], with_rules: bool) -> gateway_pb2.GenerateRequest:
    rules = decoding_pb2.LogitRules(repetition_penalty=1.5, logit_bias=BIAS) if with_rules else None
    return gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=PROMPT)),
        sampling=decoding_pb2.Sampling(seed=seed, sample_count=SAMPLES, **sampling),
        logit_rules=rules,
        stopping=decoding_pb2.Stopping(max_tokens=1, ignore_eos=True),
    )


def _chances(folder: Path, sampling: dict[str, Any], with_rules: bool) -> list[float]:
    """Return the probability of each token after PROMPT."""
    processors = LogitsProcessorList()
    if with_rules:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()]))
        processors.append(RepetitionPenaltyLogitsProcessor(1.5))
    processors.append(TemperatureLogitsWarper(sampling["temperature"]))
    processors.append(MinPLogitsWarper(sampling.get("min_p", 0.0)))
    processors.append(TopKLogitsWarper(sampling.get("top_k", 10**6)))
    processors.append(TopPLogitsWarper(sampling.get("top_p", 1.0)))
    input_ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        logits = reference_model(folder)(input_ids, use_cache=False).logits[:, -1]
        chances: list[float] = processors(input_ids, logits).softmax(dim=-1)[0].tolist()
    return chances
