"""Settings of an engine that exclude each other are refused by the chart too, not by each start of a pod."""

from itertools import combinations
from typing import Any

import pytest

from services.engine.settings import EngineSettings
from services.runtime.settings import InvalidSetting
from tests.deployment.helm.chart import Object, refusal, render

# Each with a value that another one may exclude.
VALUES: list[tuple[str, Any]] = [
    *[("device", value) for value in ("cpu", "cuda")],
    *[("attention_backend", value) for value in ("cpu", "triton", "flex")],
    *[("weights", value) for value in ("bf16", "int8", "int4")],
    ("dtype", "float16"),
    ("gpu_memory_utilization", 0.8),
    ("device_blocks", 9),
    ("cache_mib", 1000),
    ("tensor_parallel", 2),
    ("speculate_ngram", 4),
    ("token_budget", 10),
    ("max_sequences", 20),
]
PAIRS = [dict(pair) for pair in combinations(VALUES, 2) if pair[0][0] != pair[1][0]]


def refused(settings: dict[str, Any]) -> bool:
    try:
        EngineSettings(**settings)
    except InvalidSetting:
        return True
    return False


def values(settings: Object) -> Object:
    return {"engine": {"settings": settings, "resources": {"limits": {"nvidia.com/gpu": 2}}}}


EXCLUDING = [pair for pair in PAIRS if refused(pair)]


@pytest.mark.parametrize("settings", EXCLUDING, ids=str)
def test_settings_that_an_engine_refuses_together_are_refused(settings: Object) -> None:
    message = refusal(values(settings))
    assert message.count("\n- ") == 1, "only one fault is reported"
    assert all(f"engine.settings.{name}" in message for name in settings)


def test_pairs_of_each_kind_were_compared() -> None:
    assert {name for pair in EXCLUDING for name in pair} == {name for name, _ in VALUES}


def test_settings_that_an_engine_accepts_together_are_accepted() -> None:
    accepted = [pair for pair in PAIRS if pair not in EXCLUDING]
    models = [
        {"name": f"m{number}", "model": "org/a", "settings": pair, "resources": {"limits": {"nvidia.com/gpu": 2}}}
        for number, pair in enumerate(accepted)
    ]
    assert render({"models": models})


def test_a_minimum_of_n_grams_is_refused_without_proposals_and_by_ranks() -> None:
    message = refusal(values({"speculate_ngram_min": 3, "tensor_parallel": 2}))
    assert "engine.settings.speculate_ngram must not be 0 with engine.settings.speculate_ngram_min 3" in message
    assert "engine.settings.tensor_parallel must be at most 1 with engine.settings.speculate_ngram_min 3" in message


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"device": "cuda"}, "with engine.settings.kv_dtype int8 and engine.settings.device cuda, not auto"),
        (
            {"attention_backend": "flex"},
            "attention_backend must be auto, torch or cpu with engine.settings.kv_dtype int8",
        ),
        ({"tensor_parallel": 2}, "tensor_parallel must be at most 1 with engine.settings.kv_dtype int8, not 2"),
    ],
)
def test_a_cache_in_8_bits_is_refused_where_no_kernel_reads_it(settings: Object, complaint: str) -> None:
    assert complaint in refusal(values({"kv_dtype": "int8", **settings}))


@pytest.mark.parametrize(
    ("name", "because"), [("typical_tokens", "nothing to divide"), ("retention_tokens", "no block")]
)
def test_settings_of_window_kinds_are_refused_without_kinds(name: str, because: str) -> None:
    message = refusal(values({name: 4096, "kinds": "off"}))
    assert f"engine.settings.kinds must not be off with engine.settings.{name} 4096" in message
    assert because in message


@pytest.mark.parametrize(
    ("name", "because"), [("verify_blocks", "nothing to compare"), ("recompute_hits", "nothing to compare")]
)
def test_comparisons_of_blocks_are_refused_where_blocks_have_no_checksums(name: str, because: str) -> None:
    without = refusal(values({name: 0.5, "checksums": "off"}))
    assert f"engine.settings.checksums must not be off with engine.settings.{name} 0.5" in without
    assert because in without
    assert f"engine.settings.device must not be cuda with engine.settings.{name} 0.5" in refusal(
        values({name: 0.5, "device": "cuda"})
    )
