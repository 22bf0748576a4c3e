"""CPU microseconds of each process for each token, outside the kernels.

A gateway, an engine and a KV manager as processes; the engine's kernels only wait. One stream, and 32 at once, of 128
tokens in, greedy; new prompts in each repetition, in which each load is measured twice. And the gateway's microseconds
for an answer of one token over a kept-alive connection of HTTP. With QUIRE_EARLIER_CHECKOUT, the folder of an earlier
commit, its services take turns with these.
"""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from json import dumps
from pathlib import Path
from statistics import median

from bench.loads.http_server import free_address
from bench.loads.peer import Worker
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.targets import ROOT
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from services.models.model_store import default_cache, resolve
from tests.running_quire import ANY_METRICS_PORT, Output

REPETITIONS = 5
NEW_TOKENS = {1: 256, 32: 128}  # by the number of streams
PROMPT_TOKENS = 128
STEP_SECONDS = 0.02
VOCABULARY = 49_000
ANSWERS = 100
ENGINE = ROOT / "bench" / "loads" / "kernelless_engine.py"
CODE = (
    *("blocks", "engine", "kvmanager", "services", "protos", "bench/serving/overhead.py"),
    *(
        "bench/loads/kernelless_engine.py",
        "bench/loads/stream_client.py",
        "bench/loads/kept_alive_client.py",
    ),
)
_STOP_SECONDS = 30

Used = dict[str, float]  # CPU seconds by role
Runs = dict[str, dict[int, list[Used]]]  # by arm and number of streams
Answers = dict[str, list[float]]  # CPU seconds of the gateway, by arm


class Services:
    """The services of one checkout, and a client."""

    def __init__(self, checkout: Path, folder: Path, stack: ExitStack) -> None:
        self._checkout, self._stack = checkout, stack
        self._processes: dict[str, subprocess.Popen[str]] = {}
        quire = [sys.executable, "-m", "services.cli.main"]
        model = str(resolve("demo", default_cache(), lambda *_: None))
        kernels = ("--kernels-folder", str(default_cache().parent / "kernels"))
        sockets = {role: f"unix:{folder}/{role}.sock" for role in ("kvmanager", "engine", "gateway")}
        listens = {role: ("--listen", socket) for role, socket in sockets.items()}
        self._start("kvmanager", [*quire, "kvmanager", *listens["kvmanager"], "--map-listen", ""])
        engine = [sys.executable, str(ENGINE), str(STEP_SECONDS), "--model", model, "--device-blocks", "1024", *kernels]
        self._start("engine", [*engine, *listens["engine"], "--kvmanager", sockets["kvmanager"]])
        http = free_address()
        serving = ("--http-listen", http, "--engines", sockets["engine"])
        self._start("gateway", [*quire, "gateway", *listens["gateway"], *serving]).wait_for("gateway is ready")
        clients = [sys.executable, "-m"]
        command = [*clients, "bench.loads.stream_client", sockets["gateway"]]
        self._client = stack.enter_context(Worker("client", command))
        self._answers = stack.enter_context(Worker("answers", [*clients, "bench.loads.kept_alive_client", http]))

    def measure(self, line: str) -> Used:
        """Run one repetition; return the CPU seconds of each process."""
        before = self._used()
        client = self._client.measure(line)["cpu_seconds"]
        return {role: seconds - before[role] for role, seconds in self._used().items()} | {"client": client}

    def answer(self) -> float:
        """Return the gateway's CPU seconds for ANSWERS answers over one connection of HTTP."""
        before = self._used()["gateway"]
        self._answers.measure(str(ANSWERS))
        return self._used()["gateway"] - before

    def _start(self, role: str, command: list[str]) -> Output:
        path = os.pathsep.join(str(self._checkout / folder) for folder in ("", "protos"))
        process = subprocess.Popen(
            command,
            cwd=self._checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **ANY_METRICS_PORT, "PYTHONPATH": path},
        )
        self._stack.callback(_stop, process)
        self._processes[role] = process
        output = Output(process)
        output.wait_for("listens on")
        return output

    def _used(self) -> Used:
        return {role: cpu_seconds(process.pid) for role, process in self._processes.items()}


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(_STOP_SECONDS)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process. Its own counter has a resolution of only 10 ms."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def main() -> None:
    """Measure both checkouts, or this one, and publish."""
    earlier = os.environ.get("QUIRE_EARLIER_CHECKOUT")
    checkouts = {"quire": ROOT} | ({"earlier": Path(earlier)} if earlier else {})
    arms = ["quire", "again", *(name for name in checkouts if name != "quire")]
    runs: Runs = {name: {streams: [] for streams in NEW_TOKENS} for name in arms}
    answers: Answers = {name: [] for name in arms}
    with _services(checkouts) as services:
        for number in repeated(REPETITIONS, "overhead"):
            for name in in_turn(arms, number):
                spent = services["quire" if name == "again" else name].answer()
                answers[name] += [spent] if number else []
            for streams in NEW_TOKENS:
                for name in in_turn(arms, number):
                    line = _work(2 * number + (name == "again"), streams)
                    used = services["quire" if name == "again" else name].measure(line)
                    if number:
                        runs[name][streams].append(used)
    commit = earlier and _commit(Path(earlier))
    rows = [*rows_of(runs, commit), *answer_rows(answers, commit)]
    publish("overhead", rows, REPETITIONS, code=CODE, runs=runs, answers=answers, tokens=NEW_TOKENS)


def _terms(streams: int) -> Terms:
    """Return the terms of every checkout: no model computes."""
    return Terms(processes=3, work=f"{streams} streams, {PROMPT_TOKENS}/{NEW_TOKENS[streams]}, a step of 20 ms")


@contextmanager
def _services(checkouts: dict[str, Path]) -> Iterator[dict[str, Services]]:
    with ExitStack() as stack:
        folders = {name: Path(stack.enter_context(tempfile.TemporaryDirectory())) for name in checkouts}
        yield {name: Services(checkout, folders[name], stack) for name, checkout in checkouts.items()}


def _work(number: int, streams: int) -> str:
    draw = random.Random(1000 * number + streams)
    prompts = [[draw.randrange(10, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]
    return dumps([{"prompt": prompt, "tokens": NEW_TOKENS[streams]} for prompt in prompts])


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def rows_of(runs: Runs, earlier: str | None) -> list[Row]:
    """Return the microseconds of each process, and those of all over an earlier commit's."""
    rows = []
    for streams in NEW_TOKENS:
        ours, sides = runs["quire"][streams], {"quire": _terms(streams)}
        for role in ours[0]:
            micros = _micros(median(one[role] for one in ours), streams)
            rows.append(row("overhead", f"{role}_us_per_token_{streams}", micros, "us", terms=sides))
        all_ours, again, theirs = (
            [_outside_client(one) for one in runs.get(name, {}).get(streams, [])]
            for name in ("quire", "again", "earlier")
        )
        micros, null = _micros(median(all_ours), streams), null_interval(all_ours, again)
        rows.append(row("overhead", f"us_per_token_{streams}", micros, "us", terms=sides, null=null))
        ratio = round(median(own / other for own, other in zip(all_ours, theirs, strict=True)), 3) if theirs else None
        peer = earlier or "QUIRE_EARLIER_CHECKOUT is not set"
        sides |= {"earlier": _terms(streams)} if earlier else {}
        rows.append(row("overhead", f"over_earlier_{streams}", ratio, "ratio", peer, terms=sides, null=null))
    return rows


def answer_rows(answers: Answers, earlier: str | None) -> list[Row]:
    """Return the gateway's microseconds for an answer over a kept-alive connection, and those over an earlier one's."""
    ours, theirs = answers["quire"], answers.get("earlier", [])
    micros, null = round(median(ours) * 1e6 / ANSWERS, 1), null_interval(ours, answers["again"])
    terms = Terms(processes=3, work=f"{ANSWERS} answers of one token, one after another")
    sides = {"quire": terms}
    made = row("overhead", "gateway_us_per_kept_alive_answer", micros, "us", terms=sides)
    ratio = round(median(own / other for own, other in zip(ours, theirs, strict=True)), 3) if theirs else None
    sides |= {"earlier": terms} if earlier else {}
    peer = earlier or "QUIRE_EARLIER_CHECKOUT is not set"
    name = "kept_alive_answer_over_earlier"
    return [made, row("overhead", name, ratio, "ratio", peer, terms=sides, null=null)]


def _outside_client(used: Used) -> float:
    return sum(seconds for role, seconds in used.items() if role != "client")


def _micros(seconds: float, streams: int) -> float:
    return round(seconds * 1e6 / (streams * NEW_TOKENS[streams]), 1)


if __name__ == "__main__":
    main()
