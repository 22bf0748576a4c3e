"""The cost of `quire run-batch`: its tokens per second, compared with those of the same engine in process.

96 requests, each of 128 tokens in and 32 out, greedy, in bfloat16 with as many threads in both; 64 run at a time. The
command runs as a user calls it, twice in each repetition, and its own figures count from the first request, without the
load of the model. The in-process engine is a separate process, stopped meanwhile. Each repetition has new prompts, so
that nothing is cached.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.loads.engine_worker import BFLOAT16, formats_logged, model_terms
from bench.loads.peer import Figures, Worker
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval

REPETITIONS = 5
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 96, 128, 32
DEVICE_BLOCKS = 1024
VOCABULARY = 49_000
TOKENS = REQUESTS * NEW_TOKENS
THREADS = os.cpu_count() or 1
SETTINGS = {**BFLOAT16, "threads": THREADS}
WORK = f"{REQUESTS} requests, {PROMPT_TOKENS}/{NEW_TOKENS}"
ARMS = ("batch", "again", "in_process")
CODE = ("blocks", "engine", "kvmanager", "services", "bench/serving/batch.py", "bench/loads/engine_worker.py")

Work = list[dict[str, Any]]


def main() -> None:
    """Measure both in turn, and publish the ratio."""
    command = [sys.executable, "-m", "bench.loads.engine_worker", str(DEVICE_BLOCKS), json.dumps(SETTINGS)]
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder, Worker("engine", command) as engine:
        runs = [_one(Path(folder), engine, number) for number in repeated(REPETITIONS, "batch")][1:]
        terms = {"batch": terms_of_log((Path(folder) / "info").read_text()), "in_process": engine.terms(WORK)}
    publish("batch", rows_of(runs, terms), REPETITIONS, code=CODE, runs=runs)


def terms_of_log(log: str) -> Terms:
    """Return what the command's engine has logged of itself. Its engine, gateway and KV manager are one process."""
    return model_terms(*formats_logged(log), work=WORK, threads=THREADS, processes=1)


def _one(folder: Path, engine: Worker, number: int) -> dict[str, Figures]:
    """Measure all arms once, in turn, with the same prompts."""
    # It logs its formats, and each request: only while it warms up.
    work, level = _work(number), "warning" if number else "info"
    ways: dict[str, Callable[[], Figures]] = {
        "batch": lambda: _run_batch(folder, work, level),
        "again": lambda: _run_batch(folder, work, level),
        "in_process": lambda: engine.measure(json.dumps(work)),
    }
    return {name: ways[name]() for name in in_turn(ARMS, number)}


def _work(number: int) -> Work:
    draw = random.Random(number)
    prompts = [[draw.randrange(10, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
    return [{"prompt": prompt, "tokens": NEW_TOKENS} for prompt in prompts]


def _run_batch(folder: Path, work: Work, level: str) -> Figures:
    """Run the command on a new file, and keep what it logs; return its figures."""
    requests, answers, results = (folder / name for name in ("requests.jsonl", "answers.jsonl", "results.json"))
    requests.write_text("".join(json.dumps(_request(number, item)) + "\n" for number, item in enumerate(work)))
    answers.unlink(missing_ok=True)
    command = [sys.executable, "-m", "services.cli.main", "run-batch", "-i", str(requests), "-o", str(answers)]
    options = ["--model", "demo", "--device-blocks", str(DEVICE_BLOCKS), "--results", str(results)]
    options += [text for name, value in SETTINGS.items() for text in (f"--{name}", str(value))]
    done = subprocess.run([*command, *options, "--log-level", level], check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"the command ended with {done.returncode}:\n{done.stderr}")
    (folder / level).write_text(done.stderr)
    figures: Figures = json.loads(results.read_text())
    assert figures["generated_tokens"] == TOKENS, figures
    return figures


def _request(number: int, item: dict[str, Any]) -> dict[str, Any]:
    body = {"prompt": item["prompt"], "max_tokens": item["tokens"], "temperature": 0, "ignore_eos": True}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def rows_of(runs: list[dict[str, Figures]], terms: dict[str, Terms]) -> list[Row]:
    """Return speeds, CPU time, and the ratio of the speeds."""
    rates = {name: [TOKENS / run[name]["seconds"] for run in runs] for name in ARMS}
    ratios = [ours / alone for ours, alone in zip(rates["batch"], rates["in_process"], strict=True)]
    null = null_interval(rates["batch"], rates["again"])
    rows = []
    for name, own in terms.items():
        used = median(run[name]["cpu_seconds"] for run in runs)
        rate = round(median(rates[name]), 1)
        rows.append(row("batch", f"{name}_tokens_per_second", rate, "1/s", terms={name: own}))
        rows.append(row("batch", f"{name}_cpu_seconds", round(used, 2), "s", terms={name: own}))
    ratio = round(median(ratios), 3)
    return [*rows, row("batch", "over_in_process", ratio, "ratio", "the engine in process", terms=terms, null=null)]


if __name__ == "__main__":
    main()
