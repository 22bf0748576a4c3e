"""The cost of `quire run-batch`: its tokens per second, compared with those of the same engine in process.

96 requests, each of 128 tokens in and 32 out, greedy, in the default type; 64 run at a time. The command runs as a
user calls it, and its own figures count from the first request, without the load of the model. The in-process engine is
a separate process, stopped meanwhile. Each repetition has new prompts, so that nothing is cached.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.loads.peer import Figures, Worker
from bench.report.results import Row, publish, row, track

REPETITIONS = 5
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 96, 128, 32
DEVICE_BLOCKS = 1024
VOCABULARY = 49_000
TOKENS = REQUESTS * NEW_TOKENS

Work = list[dict[str, Any]]


def main() -> None:
    """Measure both in alternation, and publish the ratio."""
    with (
        tempfile.TemporaryDirectory(prefix="quire-bench-") as folder,
        Worker("engine", [sys.executable, "-m", "bench.loads.engine_worker", str(DEVICE_BLOCKS)]) as engine,
    ):
        both = [_one(Path(folder), engine, number) for number in track(range(REPETITIONS + 1), "batch")]
    runs = both[1:]  # the first warms up
    publish("batch", _rows(runs), REPETITIONS, runs=runs)


def _one(folder: Path, engine: Worker, number: int) -> dict[str, Figures]:
    """Measure both once, with the same prompts, in alternating order."""
    work = _work(number)
    ways: list[tuple[str, Callable[[], Figures]]] = [
        ("batch", lambda: _run_batch(folder, work)),
        ("in_process", lambda: engine.measure(json.dumps(work))),
    ]
    return {name: measure() for name, measure in (ways if number % 2 else ways[::-1])}


def _work(number: int) -> Work:
    draw = random.Random(number)
    prompts = [[draw.randrange(10, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
    return [{"prompt": prompt, "tokens": NEW_TOKENS} for prompt in prompts]


def _run_batch(folder: Path, work: Work) -> Figures:
    """Run the command on a new file; return its figures."""
    requests, answers, results = (folder / name for name in ("requests.jsonl", "answers.jsonl", "results.json"))
    requests.write_text("".join(json.dumps(_request(number, item)) + "\n" for number, item in enumerate(work)))
    answers.unlink(missing_ok=True)
    command = [sys.executable, "-m", "services.cli.main", "run-batch", "-i", str(requests), "-o", str(answers)]
    options = ["--model", "demo", "--device-blocks", str(DEVICE_BLOCKS), "--results", str(results)]
    subprocess.run([*command, *options], check=True)
    figures: Figures = json.loads(results.read_text())
    assert figures["generated_tokens"] == TOKENS, figures
    return figures


def _request(number: int, item: dict[str, Any]) -> dict[str, Any]:
    body = {"prompt": item["prompt"], "max_tokens": item["tokens"], "temperature": 0, "ignore_eos": True}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def _rows(runs: list[dict[str, Figures]]) -> list[Row]:
    rates = {name: [TOKENS / run[name]["seconds"] for run in runs] for name in ("batch", "in_process")}
    ratios = [ours / alone for ours, alone in zip(rates["batch"], rates["in_process"], strict=True)]
    rows = [row("batch", f"{name}_tokens_per_second", round(median(rates[name]), 1), "1/s") for name in rates]
    for name in rates:
        used = median(run[name]["cpu_seconds"] for run in runs)
        rows.append(row("batch", f"{name}_cpu_seconds", round(used, 2), "s"))
    return [*rows, row("batch", "over_in_process", round(median(ratios), 3), "ratio", "the engine in process")]


if __name__ == "__main__":
    main()
