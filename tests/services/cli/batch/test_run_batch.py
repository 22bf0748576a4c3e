"""The command `quire run-batch` in processes, with an engine of its own and with a running server."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.batch.lines import URLS
from tests.faults import wait_until
from tests.running_quire import CALL_SECONDS, START_SECONDS, RunningQuire

COMMAND = (sys.executable, "-m", "services.cli.main", "run-batch")
CHATS, COMPLETIONS, RESPONSES = URLS


def chat(number: int, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"Why {number}?"}], "seed": number, "max_tokens": 40, **fields}
    return {"custom_id": f"chat {number}", "method": "POST", "url": CHATS, "body": body}


def completion(number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": f"Once {number}", "seed": number, "max_tokens": 40, **fields}
    return {"custom_id": f"completion {number}", "method": "POST", "url": COMPLETIONS, "body": body}


def response(number: int) -> dict[str, Any]:
    body = {"input": f"Why {number}?", "max_output_tokens": 20}
    return {"custom_id": f"response {number}", "method": "POST", "url": RESPONSES, "body": body}


def write(path: Path, *requests: dict[str, Any] | str) -> Path:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in requests]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def answers_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def has_answers(output: Path) -> bool:
    return output.exists() and output.stat().st_size > 0


def start(requests: Path, output: Path, *options: str) -> "subprocess.Popen[str]":
    command = [*COMMAND, "-i", str(requests), "-o", str(output), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(requests: Path, output: Path, *options: str) -> tuple[int, str]:
    """Run to the end; return exit status and standard error."""
    process = start(requests, output, *options)
    _, errors = process.communicate(timeout=START_SECONDS)
    return process.returncode, errors


def base_url(quire: RunningQuire) -> tuple[str, str]:
    return "--base-url", quire.http_url


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def test_an_interrupted_run_with_an_own_engine_is_continued_by_a_server(
    tiny_quire: RunningQuire, tiny_model: Callable[[str], Path], tmp_path: Path, output: Path, http: httpx.Client
) -> None:
    work = [make(number) for number in range(120) for make in (chat, completion)]
    requests = write(tmp_path / "requests.jsonl", *work)
    pool = ("--device-blocks", "64", "--max-sequences", "8")
    engine = ("--model", str(tiny_model("llama")), "--dtype", "float32", *pool)
    process = start(requests, output, *engine)
    wait_until(lambda: process.poll() is not None or has_answers(output), "an answer", START_SECONDS)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    begun = output.read_bytes()
    own = answers_in(output)
    assert 0 < len(own) < len(work)

    assert finish(requests, output, *base_url(tiny_quire))[0] == 0
    assert output.read_bytes().startswith(begun)
    answers = {answer["custom_id"]: answer for answer in answers_in(output)}
    assert answers.keys() == {one["custom_id"] for one in work}
    assert len(answers_in(output)) == len(work)
    assert {answer["response"]["status_code"] for answer in answers.values()} == {200}
    by_id = {one["custom_id"]: one for one in work}
    for answer in own[:6]:
        asked = by_id[answer["custom_id"]]
        expected = http.post(asked["url"], json=asked["body"]).json()
        assert answer["response"]["body"]["choices"] == expected["choices"], "as the server answers"
        assert answer["response"]["request_id"] == answer["response"]["body"]["id"]


def test_errors_are_answers_with_their_line_and_the_exit_status_says_so(
    tiny_quire: RunningQuire, tmp_path: Path, output: Path
) -> None:
    results = tmp_path / "results.json"
    work = [chat(1), "nonsense", completion(2, temperature=-1), completion(3, prompt=["a", "b"], n=2), response(4)]
    requests = write(tmp_path / "requests.jsonl", *work)
    status, errors = finish(requests, output, *base_url(tiny_quire), "--results", str(results), "--window", "2")
    assert (status, "5 requests answered, 2 of them failed" in errors) == (1, True), errors
    answers = {answer["custom_id"]: answer for answer in answers_in(output)}
    assert answers[None]["error"] == {
        "code": "invalid_line",
        "message": "line 2: it is not JSON: Expecting value at column 1",
        "line": 2,
    }
    assert answers["completion 2"]["response"]["status_code"] == 400
    assert answers["completion 2"]["response"]["body"]["error"]["param"] == "temperature"
    assert answers["completion 2"]["error"]["message"].startswith("line 3: temperature must be")
    assert len(answers["completion 3"]["response"]["body"]["choices"]) == 4
    assert answers["response 4"]["response"]["body"]["object"] == "response"
    figures = json.loads(results.read_text())
    assert (figures["lines"], figures["answers"], figures["failures"], figures["kept"]) == (5, 5, 2, 0)
    bodies = [answer["response"]["body"] for answer in answers.values() if answer["error"] is None]
    counts = [body["usage"].get("completion_tokens", body["usage"].get("output_tokens")) for body in bodies]
    assert figures["generated_tokens"] == sum(counts) > 0

    status, errors = finish(requests, output, *base_url(tiny_quire))
    assert (status, "0 requests answered, 5 kept from before (2 of them failed)" in errors) == (1, True), errors
    assert len(answers_in(output)) == 5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--base-url", "127.0.0.1:8000"), "--base-url must be like http://host:port"),
        (("--window", "0"), "--window"),
        (("--base-url", "http://127.0.0.1:8000", "--block-size", "8"), "--block-size cannot be given with --base-url"),
        (("--base-url", "http://127.0.0.1:8000", "--explain", "chat 1"), "--explain needs an engine in this process"),
    ],
)
def test_invalid_options_are_refused_before_a_file_is_made(
    tmp_path: Path, output: Path, options: tuple[str, ...], reason: str
) -> None:
    status, errors = finish(write(tmp_path / "requests.jsonl", chat(1)), output, *options)
    assert (status, reason in errors, output.exists()) == (2, True, False), errors


def test_requests_of_an_own_engine_are_explained(
    tiny_model: Callable[[str], Path], tmp_path: Path, output: Path
) -> None:
    requests = write(
        tmp_path / "requests.jsonl", chat(1), completion(2, prompt=["a", "b"]), completion(3, n=0), chat(4)
    )
    engine = ("--model", str(tiny_model("llama")), "--dtype", "float32", "--device-blocks", "64")
    asked = [word for name in ("chat 1", "completion 2", "completion 3") for word in ("--explain", name)]
    command = [*COMMAND, "-i", str(requests), "-o", str(output), *engine]
    ended = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=START_SECONDS, check=False)
    lines = ended.stdout.splitlines()
    beginnings = [
        "chat 1: It was scheduled",
        "completion 2: prompt 0: It was scheduled",
        "completion 2: prompt 1: It was scheduled",
        "completion 3: the ledger has no event",
    ]
    assert [line[: len(start)] for line, start in zip(lines, beginnings, strict=True)] == beginnings, ended.stderr
    assert ["It finished" in line for line in lines] == [True, True, True, False]
    missing = subprocess.run([*command, "--explain", "x"], capture_output=True, text=True, check=False)
    assert (missing.returncode, "no custom_id 'x', which --explain names" in missing.stderr) == (1, True)


def test_a_repeated_id_is_refused_before_a_model_is_loaded(tmp_path: Path, output: Path) -> None:
    requests = write(tmp_path / "requests.jsonl", chat(1), chat(2), chat(1))
    status, errors = finish(requests, output, "--model", str(tmp_path / "no model"))
    assert status == 1
    assert errors == f"run-batch: {requests}: lines 1 and 3 have the same custom_id 'chat 1'\n"
    assert not output.exists()


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_requests_can_come_through_a_pipe(tiny_quire: RunningQuire, output: Path, name: str) -> None:
    given = "".join(f"{json.dumps(completion(number, max_tokens=1))}\n" for number in range(3))
    command = [*COMMAND, "-i", name, "-o", str(output), *base_url(tiny_quire)]
    ended = subprocess.run(command, input=given, stderr=subprocess.PIPE, text=True, timeout=START_SECONDS, check=False)
    assert (ended.returncode, "3 requests answered" in ended.stderr) == (0, True), ended.stderr
    assert {answer["custom_id"] for answer in answers_in(output)} == {f"completion {number}" for number in range(3)}


def test_an_empty_file_is_named(tmp_path: Path, output: Path) -> None:
    requests = write(tmp_path / "requests.jsonl", "", "")
    assert finish(requests, output) == (0, f"done: there are no requests in {requests}\n")


def test_answers_need_a_regular_file(tmp_path: Path) -> None:
    status, errors = finish(write(tmp_path / "requests.jsonl", chat(1)), Path("/dev/null"))
    assert (status, "--output-file must be a regular file, not '/dev/null'" in errors) == (2, True), errors


def test_the_file_of_requests_is_never_overwritten(tmp_path: Path) -> None:
    requests = write(tmp_path / "requests.jsonl", chat(1))
    before = requests.read_bytes()
    assert finish(requests, requests)[0] == 2
    assert requests.read_bytes() == before


@pytest.fixture(scope="module")
def http(tiny_quire: RunningQuire) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_quire.http_url, timeout=CALL_SECONDS) as client:
        yield client
