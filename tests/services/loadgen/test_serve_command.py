"""`quire bench serve` on a running Quire; its figures equal the servers' metrics."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest

from services.cli.main import cli
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.scrape import Scrape
from tests.tiny_models import CONTEXT, VOCABULARY

ROOT = Path(__file__).parents[3]
COUNTERS = ("quire_prompt_tokens_total", "quire_prompt_tokens_cached_total", "quire_generation_tokens_total")
SESSIONS = """\
{"session":0,"timestamp_ms":0,"input_length":70,"output_length":3,"block_ids":[0,1,2,3]}
{"session":0,"timestamp_ms":10,"input_length":90,"output_length":4,"block_ids":[0,1,2,3,4]}
{"session":1,"timestamp_ms":0,"input_length":40,"output_length":5,"block_ids":[7,8]}
{"session":1,"timestamp_ms":5,"input_length":5000,"output_length":5,"block_ids":[7,8]}
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.cli.main", "bench", "serve", *arguments]


def bench(quire: RunningQuire, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end against a running Quire."""
    arguments = ("--address", quire.addresses["gateway"], *arguments)
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False, timeout=CALL_SECONDS
    )


def invoke(*arguments: str, **environment: str) -> click.testing.Result:
    return click.testing.CliRunner(env=environment).invoke(cli, ["bench", "serve", *arguments])


def counters(quire: RunningQuire) -> list[float]:
    scrape = Scrape.of(quire.metrics_urls["engine"])
    return [scrape.value(name) for name in COUNTERS]


def counted_since(quire: RunningQuire, before: list[float]) -> list[float]:
    return [now - then for now, then in zip(counters(quire), before, strict=True)]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_its_tokens_and_hits_are_those_that_the_engine_counted(tiny_quire: RunningQuire, tmp_path: Path) -> None:
    before = counters(tiny_quire)
    done = bench(
        tiny_quire,
        *("--requests", "12", "--warmup", "4", "--concurrency", "4", "--processes", "2", "--prompt-seed", "77"),
        *("--input", "20-60", "--output", "5", "--prefix-tokens", "48", "--slo-ttft", "60"),
        *("--json", str(tmp_path / "all.json"), "--records", str(tmp_path / "all.jsonl")),
        *("--plot", str(tmp_path / "all.png"), "--api-key", "sesame"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    prompt, cached, generated = counted_since(tiny_quire, before)
    records = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(records) == 16
    assert {record["status"] for record in records} == {"completed"}
    assert sum(record["usage"]["prompt_tokens"] for record in records) == prompt
    assert sum(record["usage"]["cached_tokens"] for record in records) == cached > 0
    assert sum(record["output_tokens"] for record in records) == generated == 16 * 5
    assert all(record["input_tokens"] == record["usage"]["prompt_tokens"] for record in records)
    result = read(tmp_path / "all.json")
    (run,) = result["runs"]
    counted = records[4:]
    assert (run["requests"], run["completed"], run["warmup_requests"]) == (12, 12, 4)
    assert run["output_tokens"] == 60
    assert run["cached_tokens"] == sum(record["usage"]["cached_tokens"] for record in counted)
    assert run["prefix_hit_rate"] == run["cached_tokens"] / run["input_tokens"]
    assert run["latencies"]["itl"]["count"] == 12 * 4
    assert run["goodput"]["share"] == 1.0
    assert run["most_in_flight"] <= 4
    assert run["client"]["processes"] == 2
    assert (result["seed"], result["target"]["prompt_seed"], result["server"]["vocabulary_size"]) == (0, 77, 384)
    assert result["command"][-2:] == ["--api-key", "***"]
    assert "sesame" not in (tmp_path / "all.json").read_text() + done.stdout
    assert {"hardware", "versions", "command", "load_average", "workload", "bounds"} <= set(result)
    assert "12 requests completed, 0 failed, 4 of the warm-up not counted" in " ".join(done.stdout.split())
    assert (tmp_path / "all.png").stat().st_size > 10_000
    assert tiny_quire.settled_pool().sequences == 0


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_over_http_its_tokens_and_hits_are_those_that_the_engine_counted(
    tiny_quire: RunningQuire, tmp_path: Path, endpoint: str
) -> None:
    before, path = counters(tiny_quire), tmp_path / "all.json"
    done = invoke(
        *("--url", tiny_quire.http_url, "--endpoint", endpoint, "--json", str(path)),
        *("--requests", "5", "--warmup", "0", "--concurrency", "2", "--input", "40", "--output", "6"),
        *("--prefix-tokens", "32", "--vocabulary", str(VOCABULARY)),
    )
    assert (done.exit_code, done.stderr) == (0, "")
    prompt, cached, generated = counted_since(tiny_quire, before)
    result = read(path)
    (run,) = result["runs"]
    assert (run["completed"], run["output_tokens"], generated) == (5, 30, 30)
    assert run["input_tokens"] == prompt
    assert run["cached_tokens"] == cached > 0
    assert run["latencies"]["itl"]["count"] == 5 * 5
    assert result["server"]["context_tokens"] == CONTEXT
    if endpoint == "completions":  # the tokens of a chat depend on its template
        assert prompt == 5 * (32 + 40)
    assert tiny_quire.settled_pool().sequences == 0


def test_the_same_seed_sends_the_same_requests_which_hit_the_cache(tiny_quire: RunningQuire, tmp_path: Path) -> None:
    options = ("--requests", "3", "--input", "33", "--output", "2", "--concurrency", "1", "--prompt-seed", "5")
    rates = []
    for _ in range(2):
        assert bench(tiny_quire, *options, "--json", str(tmp_path / "one.json")).returncode == 0
        rates.append(read(tmp_path / "one.json")["runs"][0]["prefix_hit_rate"])
    assert rates == [0.0, pytest.approx(32 / 33)]


def test_sessions_at_each_rate_hit_only_their_own_prefixes(tiny_quire: RunningQuire, tmp_path: Path) -> None:
    trace = tmp_path / "sessions.jsonl"
    trace.write_text(SESSIONS)
    options = ("--file", str(trace), "--sweep-rate", "20,40", "--json", str(tmp_path / "all.json"))
    done = bench(tiny_quire, *options, "--plot", str(tmp_path / "all.svg"))
    assert (done.returncode, done.stderr) == (0, "")
    result = read(tmp_path / "all.json")
    assert result["workload"]["rows_left_out"] == 1  # it does not fit the model's context
    for run, rate in zip(result["runs"], (20.0, 40.0), strict=True):
        assert run["arrivals"]["rate"] == rate
        assert (run["completed"], run["output_tokens"]) == (3, 12)
        assert run["cached_tokens"] == 64  # the second call's, of the first
    assert "All rates, ms" in done.stdout
    assert (tmp_path / "all.svg").read_text().count("Normalized latency") >= 1


def test_requests_that_are_refused_are_counted_by_their_status(tiny_quire: RunningQuire, tmp_path: Path) -> None:
    done = bench(tiny_quire, "--input", "3000", "--requests", "3", "--json", str(tmp_path / "all.json"))
    assert done.returncode == 1
    assert "3 requests ended with INVALID_ARGUMENT: " in done.stdout
    (run,) = read(tmp_path / "all.json")["runs"]
    assert (run["completed"], run["failures"], run["latencies"]["e2e"]) == (0, {"INVALID_ARGUMENT": 3}, None)


def test_ctrl_c_ends_a_run_and_reports_completed_requests(tiny_quire: RunningQuire, tmp_path: Path) -> None:
    arguments = command(
        *("--address", tiny_quire.addresses["gateway"], "--requests", "100000", "--output", "2", "--input", "8"),
        *("--concurrency", "2", "--json", str(tmp_path / "all.json")),
    )
    before = counters(tiny_quire)[2]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while counters(tiny_quire)[2] < before + 20:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=CALL_SECONDS)
    assert (process.returncode, errors) == (130, "")
    assert "Interrupted" in shown
    assert read(tmp_path / "all.json")["runs"][0]["completed"] >= 5
    assert tiny_quire.settled_pool().sequences == 0


def test_an_unreachable_server_is_reported() -> None:
    for arguments in (("--address", "127.0.0.1:9"), ("--url", "http://127.0.0.1:9")):
        shown = invoke(*arguments)
        assert shown.exit_code == 1
        assert shown.output.startswith("Error: ")
        assert "127.0.0.1:9" in shown.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rate", "1", "--trace-times"], "--rate, --sweep-rate and --trace-times"),
        (["--address", "a:1", "--url", "http://b"], "--address and --url"),
        (["--requests", "1", "--duration", "1"], "--requests and --duration"),
        (["--file", __file__, "--input", "3"], "--file has its own lengths"),
        (["--cap-input", "3"], "are for a --file"),
        (["--concurrency", "2", "--processes", "3"], "--processes cannot be more"),
        (["--plot", "figures.txt"], ".png, .svg or .pdf"),
        (["--extra-body", "[1]", "--url", "http://127.0.0.1:9"], "--extra-body must be a JSON object, not '[1]'"),
        (["--json", "/no folder/figures.json"], "--json must be in an existing folder, not '/no folder/figures.json'"),
        (["--extra-body", '{"a":NaN}', "--url", "http://127.0.0.1:9"], "--extra-body must be a JSON object"),
        (["--url", "nonsense"], "--url must be a URL, http://host:port or https://host:port, not 'nonsense'"),
        (["--url", ""], "--url must be a URL, http://host:port or https://host:port, not ''"),
        (["--url", "http://127.0.0.1:99999"], "--url: the port must be between 1 and 65535, not 99999"),
        (["--rate", "nan"], "must be a number above 0, not nan"),
        (["--sweep-rate", "1,x"], "must be rates above 0, such as 1,2,4,8, not '1,x'"),
    ],
)
def test_incompatible_options_are_refused(arguments: list[str], reason: str) -> None:
    shown = invoke(*arguments)
    assert shown.exit_code == 2
    assert reason in shown.output


def test_the_help_of_every_option_is_a_sentence() -> None:
    serve = cli.commands["bench"].commands["serve"]  # type: ignore[attr-defined]
    options = [parameter for parameter in serve.params if isinstance(parameter, click.Option)]
    helps = {option.name: (option.help or "").partition(" [default")[0] for option in options}
    assert [name for name, text in helps.items() if not text.endswith(".")] == []
    shown = invoke("--help", COLUMNS="80")
    assert max(map(len, shown.output.splitlines())) <= 80
