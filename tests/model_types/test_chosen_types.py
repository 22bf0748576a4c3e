"""Twelve cases of docs/model-types.json, those of most different mechanics, are still what the file says."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.model_types.cases import case_named, cases
from tests.model_types.judgement import judge
from tests.model_types.results import RESULTS, lines_of

LINES = lines_of(RESULTS)
CHOSEN = (
    "cohere2_moe: shared experts",
    "deepseek_v3",
    "exaone4",
    "gemma3n_text",
    "gemma4_text: keys as values",
    "gpt2: scores scaled by layer",
    "gpt_oss",
    "jetmoe",
    "laguna: layers of different heads",
    "lfm2",
    "llama4_text: without chunks, queries scaled by position",
    "ministral3",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_type_is_what_the_file_says(tmp_path: Path, name: str) -> None:
    found = judge(case_named(name), tmp_path / "model")
    recorded = LINES[name]
    assert (found.outcome, found.reason) == (recorded["outcome"], recorded.get("reason", "")), "run make models"
    assert found.plan == recorded.get("plan", "")


def test_the_file_has_every_case() -> None:
    if json.loads(RESULTS.read_text())["transformers"] != version("transformers"):
        pytest.skip("another version of transformers is installed: its types may be others")
    assert LINES.keys() == {case.name for case in cases()}, "run make models"
