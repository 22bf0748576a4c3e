"""The differential of dialects: its texts, and what counts as explained."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.dialects.explanations import BY_NAME, EXPLANATIONS
from bench.dialects.page import EQUAL, EXPLAINED, UNEXPLAINED, WORSE, table
from bench.dialects.profiles import PROFILES
from bench.dialects.readings import OutputReading, differing, read_by_peer, read_by_quire
from bench.dialects.shapes import Comparison
from bench.dialects.texts import DialectText, samples
from bench.loads.peer import Peer
from bench.report.targets import results_of
from bench.serving.dialects import compared, difference, explained, rows, workload

TEXTS = {sample.name: sample for sample in samples()}
BEHIND = "hermes: text around calls"


def case_of(name: str, **theirs: Any) -> Comparison:
    """A text, with the peer's reading equal to Quire's but for some parts."""
    ours = read_by_quire(TEXTS[name])
    return Comparison(TEXTS[name], ours, ours._replace(**theirs))


def values(lines: list[dict[str, Any]] | None) -> dict[str, tuple[float | None, bool | None]]:
    return {row.metric: (row.value, row.met) for row in rows(300, lines, "vLLM")}


def test_there_are_300_texts_which_are_always_the_same() -> None:
    assert len(TEXTS) == len(samples()) == 300
    assert [sample.text for sample in samples()] == [sample.text for sample in TEXTS.values()]
    assert Counter(sample.profile for sample in TEXTS.values()) == dict.fromkeys(PROFILES, 12)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_quire_reads_the_well_formed_texts_of_each_dialect(profile: Any) -> None:
    several = read_by_quire(TEXTS[f"{profile.name}: several calls"])
    assert (several.names, several.content) == (["look_up", "now", "look_up_word"], "")
    thought = read_by_quire(TEXTS[f"{profile.name}: thought before a call"])
    assert thought.thought.startswith("The user asks for")
    assert (thought.names, thought.content) == (["look_up"], "")


def test_equal_readings_are_no_difference() -> None:
    assert difference(case_of(BEHIND)) is None
    assert explained(case_of(BEHIND)) == []


def test_a_known_difference_is_explained() -> None:
    line = difference(case_of(BEHIND, content="Let me check."))
    assert line == {"text": BEHIND, "aspects": ["content"], "explanations": ["text-behind-calls"]}


@pytest.mark.parametrize(
    "theirs",
    [
        {"content": "Let me chec"},  # another shape
        {"content": "Let me check.", "calls": ()},  # another aspect, too
        {"content": "Let me check.", "thought": "Well."},
        {"calls": (("look_up", {}), ("look_up_word", {}))},
        {"calls": (("look_up", [1]),) * 3},
        {"error": "ValueError: no"},
    ],
)
def test_another_difference_of_the_same_text_is_not_explained(theirs: dict[str, Any]) -> None:
    case = case_of(BEHIND, **theirs)
    line = difference(case)
    assert line is not None
    assert explained(case) is None
    assert line["explanations"] == []
    assert line["vllm"] == case.theirs._asdict()
    assert values([line]) == {
        "texts": (300, None),
        "texts_read_alike": (299, None),
        "explained_differences": (0, None),
        "better_read_by_vllm": (0, None),
        "unexplained_differences": (1, False),
    }


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(("several calls", "all types"))])
def test_no_explanation_covers_lost_calls_and_text(name: str) -> None:
    case = case_of(name, content="Something else.", calls=())
    assert explained(case) is None


@pytest.mark.parametrize("one", EXPLANATIONS, ids=lambda one: one.name)
def test_an_explanation_is_about_texts_that_exist(one: Any) -> None:
    assert {f"{dialect}: {kind}" for dialect in one.dialects for kind in one.kinds} <= set(TEXTS)
    assert BY_NAME[one.name] is one


def test_every_declared_dialect_has_a_text_with_the_explained_difference() -> None:
    found = {
        (name, line["text"].partition(": ")[0])
        for result in results_of("dialects").values()
        for line in result["differences"]
        for name in line["explanations"]
    }
    assert {(one.name, dialect) for one in EXPLANATIONS for dialect in one.dialects} == found


def test_without_the_peer_rows_have_no_values_and_the_target_is_not_met() -> None:
    found = values(None)
    assert found.pop("texts") == (300, None)
    assert found.pop("unexplained_differences") == (None, False)
    assert set(found.values()) == {(None, None)}


@pytest.mark.parametrize(
    ("value", "other", "aspects"),
    [
        (1, 1.0, []),
        (1, True, ["arguments"]),
        ([1], [], ["arguments"]),
        ({"a": None}, {}, ["arguments"]),
        ("", None, ["arguments"]),
    ],
)
def test_arguments_are_compared_as_json_values(value: Any, other: Any, aspects: list[str]) -> None:
    one, then = (OutputReading("", "", (("now", {"x": [given]}),)) for given in (value, other))
    assert differing(one, then) == aspects


def test_a_parser_that_fails_differs_in_nothing_else() -> None:
    one = OutputReading("", "", (("now", {}),))
    assert differing(one, one._replace(error="ValueError")) == ["error"]


def test_the_peer_gets_all_texts_and_its_answer_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "other_dialects.py"
    script.write_text(
        "import json, sys\n"
        "given = json.loads(sys.stdin.readline())\n"
        "print(json.dumps({'name': 'Other 1.0'}), flush=True)\n"
        "for _ in sys.stdin:\n"
        "    texts = [{'thought': None, 'content': one['text'], 'calls': []} for one in given['texts']]\n"
        "    print(json.dumps({'texts': texts}), flush=True)\n"
    )
    monkeypatch.setenv("OTHER_PYTHON", sys.executable)
    chosen: list[DialectText] = [TEXTS[BEHIND], TEXTS["hermes: marks in text"]]
    with Peer(script, "OTHER_PYTHON", workload(chosen)) as peer:
        answer = peer.measure("all")
    assert answer
    cases = compared(chosen, answer["texts"])
    assert [case.theirs for case in cases] == [
        read_by_peer({"thought": None, "content": one.text, "calls": []}) for one in chosen
    ]
    assert [difference(case) is None for case in cases] == [False, True]


def test_the_page_lists_explanations_with_their_texts() -> None:
    assert table({}).startswith("Not measured yet: `make bench-dialects`.")
    lines = [{"text": "a", "explanations": ["text-behind-calls"]}] * 3
    counts = {"texts": 300, EQUAL: 297, EXPLAINED: 3, WORSE: 0, UNEXPLAINED: 0}
    found = [{"metric": name, "value": value, "peer": "vLLM 1"} for name, value in counts.items()]
    text = table({"avx2": json.loads(json.dumps({"started": "1", "rows": found, "differences": lines}))})
    assert text.startswith(
        "Of 300 texts, Quire and vLLM 1 read 297 alike; 3 differ as explained below, some in two ways, and 0 otherwise."
    )
    assert "| 3 | text-behind-calls: text around calls | drops the text behind the first call |" in text
    assert len(text.splitlines()) == len(EXPLANATIONS) + 4
