"""The tables of model types say what the results of `make models` say, with reasons in plain words."""

import json
import re
from pathlib import Path

import pytest

from bench.report import model_types
from bench.report.model_types import plain_reason

CASES = [
    {"case": "doge", "outcome": "refused", "reason": "its attention uses a custom mask, which ..."},
    {"case": "doge: experts", "outcome": "refused", "reason": "its attention uses a custom mask"},
    {"case": "lfm2", "outcome": "refused", "reason": "its layer 0 is of type conv, which keeps a state besides"},
    {"case": "lfm2: attention in all layers", "outcome": "equal", "tokens": 30},
    {"case": "llama", "outcome": "equal", "tokens": 30},
    {"case": "llama: YaRN", "outcome": "wrong", "reason": "alone: token 3 | after 5"},
    {"case": "xlnet", "outcome": "not buildable", "reason": "TypeError: none"},
]


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "types.json"
    path.write_text(json.dumps({"transformers": "5.23.0", "commit": "abc", "cases": CASES}))
    monkeypatch.setattr(model_types, "MODEL_TYPES", path)


def test_a_type_is_counted_once_by_its_best_case() -> None:
    assert model_types.counts() == (
        "Of the 4 causal model types of transformers 5.23.0, 2 are served, 1 refused, and 1 neither. Cases, with "
        "variants: 3 refused, 2 equal, 1 wrong, 1 not buildable."
    )


def test_served_types_show_what_is_refused_of_them() -> None:
    assert model_types.served().splitlines()[2:] == [
        "| `lfm2` | attention in all layers | as published |",
        "| `llama` | as published |  |",
    ]


def test_refused_types_are_grouped_by_reasons_in_plain_words() -> None:
    assert model_types.refused().splitlines()[2:] == [
        "| computes a mask of its own | `doge` | its attention uses a custom mask, which ... |",
        "| has recurrent states or convolutions, besides keys and values or instead of them | `lfm2` | "
        "its layer 0 is of type conv, which keeps a state besides |",
    ]


def test_faults_are_listed_with_their_variant() -> None:
    assert model_types.others().splitlines()[2:] == [
        "| wrong | `llama` (YaRN) | alone: token 3   after 5 |",
        "| not buildable | `xlnet` | TypeError: none |",
    ]


def test_an_unknown_reason_stays_as_it_is() -> None:
    assert plain_reason("it is too new") == "it is too new"


def test_every_reason_of_the_results_has_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    lines = json.loads(model_types.MODEL_TYPES.read_text())["cases"]
    reasons = {line["reason"] for line in lines if line["outcome"] == "refused"}
    assert [reason for reason in reasons if re.fullmatch(re.escape(plain_reason(reason)), reason)] == []
