"""Servers that take turns under one client."""

import csv
import json
import sys
from pathlib import Path

import psutil
import pytest

from bench.loads.http_server import HttpServer, free_address
from bench.loads.memory import DATA_VARIABLE
from bench.report.pictures import draw
from bench.serving import servers
from bench.serving.servers import LOADS, MOST_ANSWER, Figures, Turn, lengths, rows_of
from services.loadgen.workload.arrivals import ClosedLoop, Random
from tests.faults import wait_until

# A server of completions with a child process, as those that run their engine in one.
SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "1.0"}')

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def figures(tokens: float, end: float | None, first: float | None, failed: int = 0) -> Figures:
    return {"tokens_per_second": tokens, "end_to_end_ms": end, "first_token_ms": first, "failed": failed}


def ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_server_and_its_children_run_within_turns_only(tmp_path: Path) -> None:
    address = free_address()
    command = [sys.executable, "-c", SERVER, address.rpartition(":")[2]]
    with HttpServer(command, f"http://{address}", tmp_path) as server:
        processes = server._processes()
        assert len(processes) == 2

        def stopped() -> bool:
            return {one.status() for one in processes} == {psutil.STATUS_STOPPED}

        wait_until(stopped, "the server is stopped")  # a signal takes effect later
        with server.turn():
            assert server.get("/version") == {"version": "1.0"}
            assert psutil.STATUS_STOPPED not in {one.status() for one in processes}
        wait_until(stopped, "the server is stopped")
    assert all(ended(one) for one in processes)


def test_a_server_that_ends_at_its_start_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(RuntimeError, match=r"ended with 1:\nno such model"):
        HttpServer(command, f"http://{free_address()}", tmp_path)


def test_each_repetition_alternates_the_order_of_the_servers() -> None:
    turns = servers._turns(2, ["quire", "vllm"])
    assert turns[:2] == [Turn(0, "closed_32", "quire"), Turn(0, "closed_32", "vllm")]
    assert [turn.server for turn in turns[2:]] == ["quire", "vllm"] * len(LOADS) + ["vllm", "quire"] * len(LOADS)


def test_arrivals_follow_the_name_of_the_load_and_differ_between_repetitions() -> None:
    assert servers._arrivals(Turn(3, "rate_4", "quire")) == Random(4.0, seed=3)
    assert servers._arrivals(Turn(3, "closed_32", "quire")) == ClosedLoop(32)


def test_lengths_are_a_sample_of_the_file_without_long_conversations_and_answers_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(100, 50), (200, 900), (2000, 49)]
    text = "\n".join(["prompt_tokens,output_tokens", *(f"{prompt},{output}" for prompt, output in rows)])
    (tmp_path / servers.LENGTHS_FILE).write_text(text)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert sorted(lengths(True, 2)) == [(100, 50), (200, MOST_ANSWER)]


def test_drawn_lengths_have_the_papers_mean_and_are_the_same_each_time() -> None:
    drawn = lengths(False, 2000)
    assert drawn == lengths(False, 2000)
    assert 145 < sum(one.prompt for one in drawn) / len(drawn) < 175
    assert max(one.output for one in drawn) == MOST_ANSWER


def test_lengths_are_written_as_a_file_of_the_load_generator(tmp_path: Path) -> None:
    path = servers._write(lengths(False, 3), tmp_path / "lengths.csv")
    with path.open(newline="") as file:
        rows = [tuple(map(int, row.values())) for row in csv.DictReader(file)]
    assert rows == lengths(False, 3)


def test_ratios_are_medians_of_repetitions_and_more_is_better() -> None:
    ours = [figures(120, 50, 4), figures(100, 40, 5), figures(90, 40, 5)]
    theirs = [figures(100, 100, 8, failed=2), figures(50, 60, 5), figures(60, 80, 10)]
    runs = {"quire": dict.fromkeys(LOADS, ours), "vllm": dict.fromkeys(LOADS, theirs)}
    values = {row.metric: row.value for row in rows_of(runs, "vLLM 1.0")}
    assert values["rate_1_throughput_over_vllm"] == 1.5
    assert values["rate_1_end_to_end_over_vllm"] == 2.0
    assert values["rate_1_first_token_over_vllm"] == 2.0
    assert values["closed_32_vllm_tokens_per_second"] == 60
    assert (values["quire_failed_requests"], values["vllm_failed_requests"]) == (0, 2 * len(LOADS))


def test_rows_without_the_peer_are_null_and_not_met() -> None:
    rows = rows_of({"quire": {load: [figures(120, 50, None)] for load in LOADS}}, None)
    compared = [row for row in rows if row.metric.endswith("_over_vllm")]
    assert len(compared) == 3 * len(LOADS)
    assert {(row.value, row.target, row.met) for row in compared} == {(None, 1.2, False)}
    assert {row.peer for row in compared} == {"vllm did not run: QUIRE_VLLM_PYTHON is not set"}
    assert next(row.value for row in rows if row.metric == "vllm_failed_requests") is None


def test_servers_are_drawn_with_and_without_the_peer(tmp_path: Path) -> None:
    (tmp_path / "amx").mkdir()
    ours = {load: [figures(120, 50, 4)] for load in LOADS}
    for runs in ({"quire": ours, "vllm": ours}, {"quire": ours}):
        rows = [{"metric": row.metric, "value": row.value} for row in rows_of(runs, None)]
        (tmp_path / "amx" / "servers.json").write_text(json.dumps({"rows": rows}))
        picture = draw("servers", tmp_path, tmp_path)
        assert picture is not None
        assert picture.stat().st_size > 5_000
