"""Servers that take turns under one client."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench.loads.http_server import HttpServer, free_address
from bench.loads.memory import DATA_VARIABLE, Lengths
from bench.report.pictures import draw
from bench.report.terms import Terms, UnequalTerms
from bench.serving import servers
from bench.serving.servers import (
    LOADS,
    MOST_ANSWER,
    Figures,
    Turn,
    computing,
    lengths,
    prompt_seed,
    rows_of,
    vllm_formats,
)
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


ARMS = ("quire", "again", "vllm")
QUIRE = Terms(
    weights="bfloat16", activations="bfloat16", kv_cache="bfloat16", threads=2, processes=3, work="replaced by the load"
)
VLLM = replace(QUIRE, processes=2)


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


def test_quire_runs_twice_under_each_load_and_another_arm_is_first_in_each_repetition() -> None:
    firsts = set()
    for repetition in range(1, 7):
        turns = servers.turns(repetition, ["quire", "vllm"])
        assert [turn.load for turn in turns] == [load for load in LOADS for _ in range(3)]
        assert sorted(turn.arm for turn in turns[:3]) == ["again", "quire", "vllm"]
        firsts.add(turns[0].arm)
    assert firsts == {"again", "quire", "vllm"}


def test_servers_get_the_same_prompts_and_quire_others_when_it_is_measured_again() -> None:
    seeds = {arm: [prompt_seed(Turn(number, load, arm)) for number in range(6) for load in LOADS] for arm in ARMS}
    assert seeds["quire"] == seeds["vllm"]
    assert len({*seeds["quire"], *seeds["again"]}) == 2 * len(seeds["quire"])


def test_processes_that_serve_and_threads_that_compute_are_counted_from_their_cpu_time() -> None:
    before = {1: {10: 1.0}, 2: {20: 5.0, 21: 5.0, 22: 0.1}}
    after = {1: {10: 1.2}, 2: {20: 9.0, 21: 8.5, 22: 0.3}, 3: {30: 0.0}}
    assert computing(before, after) == (2, 2)


def test_what_vllm_logs_of_its_engine_is_understood() -> None:
    log = "INFO config: model='m', dtype=torch.bfloat16, quantization=None, seed=0, kv_cache_dtype=auto, x=1"
    assert vllm_formats(log) == ("bfloat16", "bfloat16", "bfloat16")
    assert vllm_formats(log.replace("None", "awq").replace("auto", "fp8")) == ("bfloat16", "awq", "fp8")


def test_arrivals_follow_the_name_of_the_load_and_differ_between_repetitions() -> None:
    assert servers._arrivals(Turn(3, "rate_4", "quire")) == Random(4.0, seed=3)
    assert servers._arrivals(Turn(3, "closed_32", "quire")) == ClosedLoop(32)


def test_lengths_are_a_sample_of_the_file_without_long_conversations_and_answers_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(100, 50), (200, 900), (2000, 49), (0, 5), (5, 0)]
    text = "\n".join(["prompt_tokens,output_tokens", *(f"{prompt},{output}" for prompt, output in rows)])
    (tmp_path / "sharegpt_opt_lengths.csv").write_text(text)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert sorted(lengths(2)) == [(100, 50), (200, MOST_ANSWER)]


def test_lengths_are_written_as_a_file_of_the_load_generator(tmp_path: Path) -> None:
    chosen = [Lengths(3, 4), Lengths(5, 6)]
    path = servers._write(chosen, tmp_path / "lengths.csv")
    with path.open(newline="") as file:
        rows = [tuple(map(int, row.values())) for row in csv.DictReader(file)]
    assert rows == chosen


def test_ratios_are_medians_of_repetitions_and_more_is_better() -> None:
    ours = [figures(120, 50, 4), figures(100, 40, 5), figures(90, 40, 5)]
    theirs = [figures(100, 100, 8, failed=2), figures(50, 60, 5), figures(60, 80, 10)]
    again = [figures(100, 50, 4), figures(100, 50, 5), figures(100, 40, 5)]
    arms = {"quire": ours, "again": again, "vllm": theirs}
    runs = {arm: dict.fromkeys(LOADS, found) for arm, found in arms.items()}
    rows = {row.metric: row for row in rows_of(runs, {"quire": QUIRE, "vllm": VLLM}, "vLLM 1.0")}
    values = {metric: row.value for metric, row in rows.items()}
    assert values["rate_4_throughput_as_servers_over_vllm"] == 1.5
    assert values["rate_4_end_to_end_as_servers_over_vllm"] == 2.0
    assert values["rate_4_first_token_as_servers_over_vllm"] == 2.0
    assert values["closed_32_vllm_tokens_per_second"] == 60
    assert (values["quire_failed_requests"], values["vllm_failed_requests"]) == (0, 2 * len(LOADS))
    compared = rows["closed_32_throughput_as_servers_over_vllm"]
    assert compared.null == (0.9, 1.2)
    assert [(name, terms.processes) for name, terms in compared.terms.items()] == [("quire", 3), ("vllm", 2)]


@pytest.mark.parametrize("theirs", [replace(VLLM, weights="float32"), replace(VLLM, threads=1)])
def test_servers_that_ran_on_other_terms_are_not_compared(theirs: Terms) -> None:
    runs = {arm: {key: [figures(100, 50, 4)] for key in LOADS} for arm in ARMS}
    with pytest.raises(UnequalTerms, match=r"rate_4_throughput_as_servers_over_vllm: (weights|threads) is"):
        rows_of(runs, {"quire": QUIRE, "vllm": theirs}, "vLLM 1.0")


@pytest.mark.parametrize("unset", ["QUIRE_VLLM_PYTHON", "VLLM_MODEL"])
def test_rows_without_the_peer_are_null_and_not_met(unset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in servers.PEER_VARIABLES:
        monkeypatch.setenv(name, "somewhere")
    monkeypatch.delenv(unset)
    ours = {load: [figures(120, 50, None)] for load in LOADS}
    rows = rows_of({"quire": ours, "again": ours}, {"quire": QUIRE}, None)
    compared = [row for row in rows if row.metric.endswith("_over_vllm")]
    assert len(compared) == 3 * len(LOADS)
    assert {(row.value, row.target, row.met) for row in compared} == {(None, 1.5, False)}
    assert {row.peer for row in compared} == {f"vllm did not run: {unset} is not set"}
    assert next(row.value for row in rows if row.metric == "vllm_failed_requests") is None


def test_servers_are_drawn_with_and_without_the_peer(tmp_path: Path) -> None:
    (tmp_path / "amx").mkdir()
    ours = {load: [figures(120, 50, 4)] for load in LOADS}
    for arms in (("quire", "again", "vllm"), ("quire", "again")):
        found = rows_of(dict.fromkeys(arms, ours), {"quire": QUIRE}, None)
        rows = [{"metric": row.metric, "value": row.value} for row in found]
        (tmp_path / "amx" / "servers.json").write_text(json.dumps({"rows": rows}))
        picture = draw("servers", tmp_path, tmp_path)
        assert picture is not None
        assert picture.stat().st_size > 5_000
