"""The files of a batch: lines that are no requests, answers of earlier runs, and what does not belong together."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.cli.batch.answers import AnswerFile, UnusableFile, answered, refused_line
from services.cli.batch.lines import URLS, Line, read
from services.cli.batch.plan import BatchPlan, InvalidBatch
from services.runtime.http.json_body import MAX_DEPTH

GOOD = {"custom_id": "a", "method": "POST", "url": URLS[0], "body": {"messages": []}}


def request(custom_id: str, **body: Any) -> dict[str, Any]:
    return {**GOOD, "custom_id": custom_id, "body": body}


def write(path: Path, *requests: dict[str, Any] | str) -> Path:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in requests]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return write(tmp_path / "requests.jsonl", *(request(f"r{number}", prompt=f"{number}") for number in range(4)))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def lines_of(requests: Path) -> list[Line]:
    return list(read(requests))


def finish(output: Path, lines: Sequence[Line]) -> None:
    """Write good answers to these lines, as a run does."""
    answers = AnswerFile(output)
    answers.begin()
    for line in lines:
        answers.append(answered(line, 200, "id", {"usage": {}}))
    answers.close()


def open_ids(requests: Path, output: Path) -> list[str | None]:
    answers = AnswerFile(output)
    try:
        return [line.custom_id for line in BatchPlan.of(requests, answers).open_lines()]
    finally:
        answers.close()


# Lines


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "it must be nested at most 65 levels deep"),
        ('{"custom_id": "a", "custom_id": "b"}', "the key 'custom_id' is duplicated"),
        ({**GOOD, "custom_id": "\ud800"}, "it has an unpaired surrogate"),
        ({**GOOD, "body": {"prompt": "\udfff"}}, "it has an unpaired surrogate"),
        ("7", "not a JSON object"),
        ({**GOOD, "custom_id": None}, "custom_id must be a text"),
        ({**GOOD, "custom_id": ""}, "custom_id must be a text"),
        ({**GOOD, "custom_id": "x" * 513}, "custom_id must be a text"),
        ({**GOOD, "priority": 1}, 'unknown field "priority"'),
        ({**GOOD, "method": "GET"}, 'method must be POST, not "GET"'),
        ({**GOOD, "url": "/v1/embeddings"}, 'not "/v1/embeddings"'),
        ({**GOOD, "body": []}, "body must be a JSON object"),
        ({**GOOD, "body": {"stream": True}}, "body.stream must not be true"),
    ],
)
def test_a_line_that_is_no_request_has_a_fault(tmp_path: Path, line: dict[str, Any] | str, fault: str) -> None:
    [found] = read(write(tmp_path / "requests", line))
    assert fault in found.fault
    answer = refused_line(found)
    assert answer["error"]["line"] == 1
    assert answer["error"]["message"].startswith("line 1: ")
    assert (answer["response"], answer["custom_id"]) == (None, found.custom_id)


def test_a_binary_line_is_not_utf_8(tmp_path: Path) -> None:
    requests = tmp_path / "requests"
    requests.write_bytes(b"\x00\xff\x00{\n" + json.dumps(GOOD).encode())
    assert [line.fault for line in lines_of(requests)] == ["it is not UTF-8: invalid start byte at byte 1", ""]


def test_a_malformed_line_keeps_an_id_that_can_be_written(tmp_path: Path) -> None:
    requests = write(tmp_path / "requests", request("a", prompt="\ud800"), request("\ud800"), request("é", prompt="é"))
    assert [line.custom_id for line in lines_of(requests)] == ["a", None, "é"]


def test_a_body_has_as_many_levels_as_over_http(tmp_path: Path) -> None:
    lists = [json.loads("[" * levels + "]" * levels) for levels in (MAX_DEPTH - 1, MAX_DEPTH)]
    found = lines_of(write(tmp_path / "requests", *(request(str(at), prompt=one) for at, one in enumerate(lists))))
    assert [(line.custom_id, bool(line.fault)) for line in found] == [("0", False), ("1", True)]


def test_lines_are_numbered_with_blank_ones_which_are_left_out(tmp_path: Path) -> None:
    found = lines_of(write(tmp_path / "requests", "", GOOD, "  ", {**GOOD, "custom_id": "b"}))
    assert [(line.number, line.custom_id, line.fault) for line in found] == [(2, "a", ""), (4, "b", "")]


def test_a_line_too_long_is_skipped_without_the_next_one(tmp_path: Path) -> None:
    found = lines_of(write(tmp_path / "requests", request("long", prompt="x" * 20_000_000), GOOD))
    assert [(line.number, line.custom_id) for line in found] == [(1, None), (2, "a")]
    assert "bytes" in found[0].fault
    assert len(found[0].content) < 6_000_000


@pytest.mark.parametrize(
    ("body", "sequences"),
    [({}, 1), ({"n": 3}, 3), ({"prompt": [1, 2], "n": 2}, 2), ({"prompt": ["a", "b"], "n": 2}, 4), ({"n": "x"}, 1)],
)
def test_sequences_are_counted_from_the_body(tmp_path: Path, body: dict[str, Any], sequences: int) -> None:
    assert lines_of(write(tmp_path / "requests", {**GOOD, "body": body}))[0].sequences == sequences


# Continuing


def test_answered_requests_are_not_open(requests: Path, output: Path) -> None:
    lines = lines_of(requests)
    finish(output, [lines[2], lines[0]])
    assert open_ids(requests, output) == ["r1", "r3"]


def test_lines_without_an_id_are_known_by_their_number(tmp_path: Path, output: Path) -> None:
    requests = write(tmp_path / "requests", "nonsense", GOOD, "more nonsense")
    answers = AnswerFile(output)
    answers.begin()
    answers.append(refused_line(lines_of(requests)[2]))
    answers.close()
    assert open_ids(requests, output) == [None, "a"]
    again = AnswerFile(output)
    assert again.failures == 1
    again.close()


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_is_removed_and_its_request_is_open(requests: Path, output: Path, cut: int) -> None:
    lines = lines_of(requests)
    finish(output, lines[:2])
    whole = output.read_bytes()
    output.write_bytes(whole[:-cut])
    assert open_ids(requests, output) == ["r1", "r2", "r3"]
    assert output.read_bytes() == whole[:-cut], "not changed before the run begins"
    finish(output, lines[1:])
    assert open_ids(requests, output) == []
    assert output.read_bytes().startswith(whole)


def test_more_lines_can_be_added_to_the_requests_later(requests: Path, output: Path) -> None:
    finish(output, lines_of(requests))
    write(requests, *map(json.loads, requests.read_text().splitlines()), request("new", prompt="n"))
    assert open_ids(requests, output) == ["new"]


def test_a_request_that_has_changed_since_its_answer_is_refused_by_name(requests: Path, output: Path) -> None:
    finish(output, lines_of(requests))
    changed = [request(f"r{number}", prompt=f"{number}") for number in range(4)]
    changed[2]["body"]["prompt"] = "another"
    with pytest.raises(UnusableFile, match=r"line 3 \(r2\) has changed"):
        open_ids(write(requests, *changed), output)


def test_the_order_of_keys_and_of_lines_is_no_change(requests: Path, output: Path) -> None:
    finish(output, lines_of(requests)[1:])
    turned = [dict(reversed(request(f"r{number}", prompt=f"{number}").items())) for number in (3, 1, 0, 2)]
    assert open_ids(write(requests, *turned), output) == ["r0"]


def test_answers_to_requests_that_are_gone_are_refused_by_name(requests: Path, output: Path) -> None:
    finish(output, lines_of(requests))
    with pytest.raises(UnusableFile, match="'r3'"):
        open_ids(write(requests, *(request(f"r{number}", prompt=f"{number}") for number in range(3))), output)


def test_an_id_used_twice_is_refused_with_both_lines(tmp_path: Path, output: Path) -> None:
    requests = write(tmp_path / "requests", GOOD, "nonsense", request("b"), request("a", n=1))
    with pytest.raises(InvalidBatch, match="lines 1 and 4 have the same custom_id 'a'"):
        open_ids(requests, output)


def test_unpaired_surrogates_of_a_server_are_written_as_escapes(requests: Path, output: Path) -> None:
    answers = AnswerFile(output)
    answers.begin()
    answers.append(answered(lines_of(requests)[0], 200, "id", {"text": "é\ud800"}))
    answers.close()
    assert json.loads(output.read_text(encoding="utf-8"))["response"]["body"] == {"text": "é\ud800"}


@pytest.mark.parametrize("content", ["hello\n", "{}\n", '{"custom_id":"a","id":"x","response":null,"error":null}\n'])
def test_a_file_of_something_else_is_left_unchanged(requests: Path, output: Path, content: str) -> None:
    output.write_text(content)
    with pytest.raises(UnusableFile, match=r"line 1 of .* is no answer"):
        open_ids(requests, output)
    assert output.read_text() == content


def test_two_runs_cannot_write_to_one_file(output: Path) -> None:
    late, first = AnswerFile(output), AnswerFile(output)
    first.begin()
    with pytest.raises(UnusableFile, match="another run"):
        AnswerFile(output)
    with pytest.raises(UnusableFile, match="another run"):
        late.begin()
    first.append({})
    first.close()
    with pytest.raises(UnusableFile, match="another run"):
        late.begin()
    output.write_bytes(b"")
    AnswerFile(output).close()
