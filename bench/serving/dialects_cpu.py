"""CPU time of the gateway for each token of thoughts and calls of tools, over that of plain text; and first tokens.

An engine without a model generates set answers of equal length in steps of 6 ms, which real gateways stream over HTTP.
Each selection of parsers is a gateway of its own. That of plain text has the parsers `none`, and its requests no tools,
but in a message what other gateways write of tools, so that prompts are equal.

For the CPU time two gateways serve 32 streams each, side by side: a shared machine changes its speed from second to
second, which both then feel alike. One of both has plain text. Where the other one has, too, the ratio shows by how
much equal programs differ. The time is that of all threads and children of a gateway, from the first request to the
last answer, prompts included. First tokens are of 32 streams alone, short answers, all arms in turn.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.loads.dialect_answers import TOOLS, answers, described, model_folder
from bench.loads.http_server import MODEL, free_address
from bench.loads.peer import Worker
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import Interval, null_interval
from bench.serving.overhead import cpu_seconds
from services.models.model_store import default_cache, resolve
from tests.running_quire import RunningService

REPETITIONS = 5
STREAMS, NEW_TOKENS, FIRST_TOKENS = 32, 512, 32
TURNS = 2  # of both gateways, one for each order
FIRST_TURNS = 5
STEP_MICROSECONDS = 6_000
# Options of parsers, by gateway.
GATEWAYS = {
    "plain": ("none", "none"),
    "again": ("none", "none"),
    "hermes": ("hermes", "think"),
    "qwen3-coder": ("qwen3-coder", "think"),
    "deepseek-v3.1": ("deepseek-v3.1", "think"),
}
CODE = (
    *("services/gateway", "services/runtime", "services/wire", "protos", "bench/serving/dialects_cpu.py"),
    *("bench/loads/dialect_answers.py", "bench/loads/null_engine.py", "bench/loads/workers/chat_client.py"),
)
_SYSTEM = {"role": "system", "content": "You mend programs. Answer in a few words, and use the tools."}


@dataclass(frozen=True)
class Arm:
    """What is measured: a gateway, the answer of the engine, and whether requests offer tools."""

    gateway: str
    answer: str
    tools: bool = False


ARMS = {
    "plain": Arm("plain", "text"),
    "again": Arm("again", "text"),
    "thought": Arm("hermes", "thought"),
    "text_beside_tools": Arm("hermes", "text", tools=True),
    "hermes": Arm("hermes", "hermes", tools=True),
    "qwen3_coder": Arm("qwen3-coder", "qwen3-coder", tools=True),
    "deepseek": Arm("deepseek-v3.1", "deepseek-v3.1", tools=True),
}
# Their first token shows at once; calls have a mark and a name in front of what is shown.
TEXTS = ("thought", "text_beside_tools")

Run = dict[str, Any]
Runs = Sequence[dict[str, Run]]  # figures of each arm, for each repetition


@dataclass(frozen=True)
class DialectGateways:
    """The gateways by name with the addresses of their HTTP servers, and the answers of their engine in order."""

    running: Mapping[str, RunningService]
    addresses: Mapping[str, str]
    answers: Sequence[str]

    def cpu_seconds(self, name: str) -> float:
        """Return the CPU time so far of a gateway and its children."""
        gateway = psutil.Process(self.running[name].process.pid)
        return sum(cpu_seconds(one.pid) for one in (gateway, *gateway.children(recursive=True)))

    def work(self, arm: Arm, number: int, tokens: int) -> dict[str, Any]:
        """Return the client's work with one gateway. Prompts of another number are others."""
        bodies = [self._body(arm, f"{number}-{stream}", tokens) for stream in range(STREAMS)]
        return {"address": self.addresses[arm.gateway], "bodies": bodies}

    def _body(self, arm: Arm, name: str, tokens: int) -> dict[str, Any]:
        messages = [_SYSTEM, {"role": "user", "content": f"Case {name}: the table of ships is wrong. Mend it."}]
        special: dict[str, Any] = {"tools": TOOLS} if arm.tools else {}
        if arm.answer == "thought":
            special["chat_template_kwargs"] = {"enable_thinking": True}
        return {
            "model": MODEL,
            "messages": messages if arm.tools else described(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "seed": self.answers.index(arm.answer),
            "max_tokens": tokens,
            **special,
        }


class Measurement:
    """Runs of the client with the gateways. Each has new prompts."""

    def __init__(self, running: DialectGateways, client: Worker) -> None:
        self._running = running
        self._client = client
        self._numbers = count()

    def repetition(self, number: int) -> dict[str, Run]:
        """Measure all arms in turn."""
        names = in_turn(list(ARMS), number)
        runs = {name: self._side_by_side(name) for name in names if name != "plain"} | {"plain": {}}
        waits = [self._alone(name) for _ in range(FIRST_TURNS) for name in names]
        for name in names:
            own = [wait for one, wait in waits if one == name]
            runs[name]["first_token_seconds"] = median(own)
        return runs

    def _side_by_side(self, name: str) -> Run:
        """Return the microseconds of an arm and of plain text, and the arm's chunks."""
        used, got = {name: 0.0, "plain": 0.0}, {}
        for turn in range(TURNS):
            names = [name, "plain"][:: -1 if turn % 2 else 1]
            before = {one: self._running.cpu_seconds(ARMS[one].gateway) for one in names}
            got = self._measured(names, NEW_TOKENS)
            for one in names:
                used[one] += self._running.cpu_seconds(ARMS[one].gateway) - before[one]
        micros = {one: seconds * 1e6 / (TURNS * STREAMS * NEW_TOKENS) for one, seconds in used.items()}
        chunks = got[name]["chunks"] / (STREAMS * NEW_TOKENS)
        return {"us_per_token": micros[name], "plain_us_per_token": micros["plain"], "chunks_per_token": chunks}

    def _alone(self, name: str) -> tuple[str, float]:
        return name, self._measured([name], FIRST_TOKENS)[name]["first_token_seconds"]

    def _measured(self, names: Sequence[str], tokens: int) -> dict[str, Run]:
        """Run all streams of arms at once. Raises AssertionError if the client got something else."""
        work = [self._running.work(ARMS[name], next(self._numbers), tokens) for name in names]
        found = dict(zip(names, self._client.measure(json.dumps(work))["sides"], strict=True))
        for name, got in found.items():
            answer = ARMS[name].answer
            assert got["completion_tokens"] == STREAMS * tokens, got
            assert bool(got["thought"]) == (answer == "thought"), got
            assert bool(got["calls"]) == (answer not in ("text", "thought")), got
        return found


def main(repetitions: int) -> None:
    """Measure all arms, and publish."""
    with gateways() as running, Worker("client", [sys.executable, "-m", "bench.loads.workers.chat_client"]) as client:
        measurement = Measurement(running, client)
        runs = [measurement.repetition(number) for number in repeated(repetitions, "dialects_cpu")]
    runs = runs[1:]  # the first warms up
    publish("dialects_cpu", rows_of(runs), repetitions, code=CODE, runs=runs)


@contextmanager
def gateways() -> Iterator[DialectGateways]:
    """Run the services."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = model_folder(resolve("demo", default_cache(), lambda *_: None), folder / MODEL)
        written = answers(model, NEW_TOKENS)
        (folder / "scripts").write_text(json.dumps(list(written.values())))

        def start(label: str, at: str, *arguments: str, module: str = "") -> RunningService:
            listen = ("--listen", f"unix:{folder}/{at}.sock")
            return stack.enter_context(closing(RunningService(label, *listen, *arguments, module=module)))

        manager = start("kvmanager", "kvmanager").address
        of_engine = ("--kvmanager", manager, "--model", str(model), "--scripts", str(folder / "scripts"))
        pace = ("--microseconds-per-step", str(STEP_MICROSECONDS))
        engine = start("engine", "engine", *of_engine, *pace, module="bench.loads.null_engine")
        addresses = {one: free_address() for one in GATEWAYS}
        running = {}
        for one, (calls, thoughts) in GATEWAYS.items():
            parsers = ("--tool-call-parser", calls, "--reasoning-parser", thoughts)
            running[one] = start("gateway", one, "--engines", engine.address, "--http-listen", addresses[one], *parsers)
        for gateway in running.values():
            gateway.output.wait_for("gateway is ready")
        yield DialectGateways(running, addresses, list(written))


def rows_of(runs: Runs) -> list[Row]:
    """Return the CPU time and the first token of each arm, and both over those of plain text."""
    terms = {name: Terms(work=f"{STREAMS} streams of {NEW_TOKENS} tokens, a step of 6 ms") for name in ARMS}
    null = null_interval(_column(runs, "again", "us_per_token"), _column(runs, "again", "plain_us_per_token"))
    rows = [
        _row("plain_us_per_token", _median(runs, "again", "plain_us_per_token"), "us", terms, "plain"),
        _row("plain_first_token_ms", 1000 * _median(runs, "plain", "first_token_seconds"), "ms", terms, "plain"),
    ]
    for name in (name for name in ARMS if name not in ("plain", "again")):
        ratio = median(run[name]["us_per_token"] / run[name]["plain_us_per_token"] for run in runs)
        rows += [
            _row(f"{name}_us_per_token", _median(runs, name, "us_per_token"), "us", terms, name),
            _row(f"{name}_over_plain", ratio, "ratio", terms, name, "plain", null=null),
            _row(f"{name}_chunks_per_token", _median(runs, name, "chunks_per_token"), "chunks", terms, name),
            *_first_token_rows(name, runs, terms),
        ]
    return rows


def _first_token_rows(name: str, runs: Runs, terms: Mapping[str, Terms]) -> Iterator[Row]:
    """Yield the time, its ratio and, where the answer shows at once, how far that is above what equal programs have."""
    own, again, plain = (_column(runs, one, "first_token_seconds") for one in (name, "again", "plain"))
    null = null_interval(again, plain)
    ratio = median(one / other for one, other in zip(own, plain, strict=True))
    yield _row(f"{name}_first_token_ms", 1000 * median(own), "ms", terms, name)
    yield _row(f"{name}_first_token_over_plain", ratio, "ratio", terms, name, "plain", null=null)
    if name in TEXTS:
        beyond = max(0.0, ratio - null[1])
        yield _row(f"{name}_first_token_beyond_null_interval", beyond, "ratio", terms, name, "plain")


def _row(
    metric: str, value: float, unit: str, terms: Mapping[str, Terms], *sides: str, null: Interval | None = None
) -> Row:
    peer = "plain text" if len(sides) > 1 else None
    return row("dialects_cpu", metric, round(value, 4), unit, peer, terms={one: terms[one] for one in sides}, null=null)


def _median(runs: Runs, name: str, metric: str) -> float:
    return median(_column(runs, name, metric))


def _column(runs: Runs, name: str, metric: str) -> list[float]:
    return [run[name][metric] for run in runs]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS)
