"""Weights as people publish them: quality beside their own values, speed beside GGUF files of the same bits, memory.

The demo model's matrices are rounded to nearest and stored in each format (`bench/formats`). Quality: an engine with
packed weights, and one that dequantizes them in float32, beside one in float32 with the values that the file codes.
Speed: beside a GGUF file whose matrices have as many bits, Q4_0, Q8_0 or BF16, with an embedding in bfloat16 as in the
other files; Q4_0 runs twice. Memory: of loading a folder with the shape of a Llama with 1 billion weights.

Quality needs wikitext2_valid.txt in the folder QUIRE_DATA. QUICK=1: two windows, one repetition; only prints.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.engine.cpu import WORKLOADS, speed_ratio, work_of
from bench.engine.perplexity import windows_of
from bench.formats import memory
from bench.formats.folders import FORMATS, write_gguf, write_published
from bench.loads.ceiling import ModelSizes
from bench.loads.peer import Worker
from bench.report.results import Row, in_turn, print_rows, publish, repeated, row, track
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from bench.weights.quality import Windows, over, perplexity_of
from services.models.model_store import default_cache, resolve

QUICK = bool(os.environ.get("QUICK"))
REPETITIONS = 1 if QUICK else 5
WINDOWS, WINDOW_TOKENS = 2 if QUICK else 10, 1024
SPEEDS = ("b1", "b32", "first_token_1024")
COMMAND = (sys.executable, "-m", "bench.weights.worker")
FLOAT32 = {"dtype": "float32", "weights": "auto"}
PACKED = {"dtype": "auto", "weights": "auto"}
AGAIN = "Q4_0 again"
CODE = ("blocks", "engine", "services/engine", "bench/engine/formats.py", "bench/formats", "bench/weights/worker.py")

Seconds = dict[str, dict[str, list[float]]]  # by workload and program


def main() -> None:
    """Measure everything, and publish it."""
    demo = resolve("demo", default_cache(), lambda *_: None)
    windows = windows_of(demo, WINDOWS, WINDOW_TOKENS)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = [one for name in track(FORMATS, "quality") for one in _quality(name, demo, folder, windows)]
        found, terms = _speeds(demo, folder)
        rows += [one for name in FORMATS for one in _speed_rows(name, found, terms)]
        used = memory.measured(folder, demo)
    rows += memory.rows_of(used)
    if QUICK:
        print_rows("formats", rows)
    else:
        publish("formats", rows, REPETITIONS, code=CODE, seconds=found, memory=used)


def _quality(name: str, demo: Path, folder: Path, windows: Sequence[Sequence[int]]) -> list[Row]:
    """Write the folders of a format; return its rows of perplexity. The folder with dense values is removed."""
    write_published(demo, name, folder)
    dense, _ = _scored(folder / f"{name}-dense", FLOAT32, windows)
    subprocess.run(["rm", "-r", str(folder / f"{name}-dense")], check=True)
    sides = {"packed": _scored(folder / name, PACKED, windows), "float32": _scored(folder / name, FLOAT32, windows)}
    rows = [row("formats", f"{name}_perplexity", round(perplexity_of(sides["packed"][0]), 4), "1")]
    for side, (found, terms) in sides.items():
        ratio, error = over(found, dense)
        metric, of = f"{name}_{side}_perplexity_difference", {name: replace(terms, work=f"{len(windows)} windows")}
        rows.append(row("formats", metric, round(abs(ratio - 1), 6), "share", "its values in float32", terms=of))
        rows.append(row("formats", f"{metric}_standard_error", round(error, 6), "share", terms=of))
    return rows


def _scored(model: Path, settings: Mapping[str, str], windows: Sequence[Sequence[int]]) -> tuple[Windows, Terms]:
    with _worker(model, settings, {}) as worker:
        return worker.measure(json.dumps({"score": windows}))["logprobs"], worker.terms("")


@contextmanager
def _worker(model: Path, settings: Mapping[str, str], works: Mapping[str, Any]) -> Iterator[Worker]:
    given = json.dumps({"model": str(model), **settings})
    worker = Worker(model.name, [*COMMAND, given], first=json.dumps(works) + "\n")
    try:
        yield worker
    finally:
        worker.close()


def _speeds(demo: Path, folder: Path) -> tuple[Seconds, dict[str, Terms]]:
    """Return the seconds of each workload with each format, and with the GGUF files, in turn; and the terms of each."""
    models = {name: folder / name for name in FORMATS}
    for kind in sorted({form.same_bits for form in FORMATS.values()}):
        models[kind] = write_gguf(demo, kind, folder / f"demo-{kind}.gguf")
    models[AGAIN] = models["Q4_0"]
    works = {name: work_of(ModelSizes.of(demo).vocabulary, *WORKLOADS[name]) for name in SPEEDS}
    workers: dict[str, Worker] = {}
    try:
        for label, model in models.items():
            given = json.dumps({"model": str(model), **PACKED})
            workers[label] = Worker(label, [*COMMAND, given], first=json.dumps(works) + "\n")
        found: Seconds = {name: {label: [] for label in models} for name in SPEEDS}
        for number in repeated(REPETITIONS, "speed"):
            for name in SPEEDS:
                for label in in_turn([*models], number):
                    seconds = workers[label].measure(json.dumps({"run": name}))["seconds"]
                    found[name][label] += [seconds] if number else []
        return found, {label: worker.terms("") for label, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()


def _speed_rows(name: str, found: Seconds, terms: Mapping[str, Terms]) -> list[Row]:
    kind, rows = FORMATS[name].same_bits, []
    for work in SPEEDS:
        ours, theirs = found[work][name], found[work][kind]
        both = {label: replace(terms[label], work=work) for label in (name, kind)}
        null = null_interval(found[work]["Q4_0"], found[work][AGAIN])
        rows.append(row("formats", f"{name}_{work}_seconds", round(median(ours), 4), "s", terms={name: both[name]}))
        ratio, peer = speed_ratio(theirs, ours), f"GGUF, {kind}"
        rows.append(row("formats", f"{name}_{work}_over_gguf", ratio, "ratio", peer, terms=both, null=null))
    return rows


if __name__ == "__main__":
    main()
