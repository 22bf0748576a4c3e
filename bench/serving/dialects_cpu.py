"""CPU time of the gateway for each token of thoughts and calls of tools, over that of plain text; and first tokens.

An engine without a model generates set answers of equal length, in steps of 15 ms. 32 chats at once stream over HTTP
from a real gateway; each selection of parsers is a gateway of its own, with the same engine. Plain text comes from one
whose parsers are `none`, and once more from another such gateway: the ratio of both gives the interval by which equal
programs differ. Its requests offer no tools, but have in a message what the gateway writes of tools in the others, so
that prompts are equal. The CPU time is that of all threads and children of a gateway, from the first request to the
last answer, prompts included.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.loads.dialect_answers import TOOLS, answers, described, model_folder
from bench.loads.http_server import MODEL, free_address
from bench.loads.peer import Worker
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from bench.serving.overhead import cpu_seconds
from services.models.model_store import default_cache, resolve
from tests.running_quire import RunningService

REPETITIONS = 5
STREAMS, NEW_TOKENS = 32, 256
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

    def line(self, arm: Arm, number: int) -> str:
        """Return the client's work. Prompts of another number are others."""
        bodies = [self._body(arm, f"{number}-{stream}") for stream in range(STREAMS)]
        return json.dumps({"address": self.addresses[arm.gateway], "bodies": bodies})

    def _body(self, arm: Arm, name: str) -> dict[str, Any]:
        messages = [_SYSTEM, {"role": "user", "content": f"Case {name}: the table of ships is wrong. Mend it."}]
        offered = {"tools": TOOLS} if arm.tools else {}
        return {
            "model": MODEL,
            "messages": messages if arm.tools else described(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "seed": self.answers.index(arm.answer),
            "max_tokens": NEW_TOKENS,
            **offered,
        }


def main(repetitions: int) -> None:
    """Measure all arms in turn, and publish."""
    runs: list[dict[str, Run]] = []
    with gateways() as running, Worker("client", [sys.executable, "-m", "bench.loads.workers.chat_client"]) as client:
        for number in repeated(repetitions, "dialects_cpu"):
            names = in_turn(list(ARMS), number)
            runs.append({name: _measured(running, client, ARMS[name], _number(number, name)) for name in names})
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
            running[one] = start(
                "gateway", one, "--engines", engine.address, "--http-listen", addresses[one], *parsers
            )
        for gateway in running.values():
            gateway.output.wait_for("gateway is ready")
        yield DialectGateways(running, addresses, list(written))


def _number(repetition: int, name: str) -> int:
    return len(ARMS) * repetition + list(ARMS).index(name)


def _measured(running: DialectGateways, client: Worker, arm: Arm, number: int) -> Run:
    """Run all streams of an arm once. Raises AssertionError if the client got something else."""
    line, before = running.line(arm, number), running.cpu_seconds(arm.gateway)
    got = dict(client.measure(line))
    used = running.cpu_seconds(arm.gateway) - before
    assert got["completion_tokens"] == STREAMS * NEW_TOKENS, got
    assert bool(got["thought"]) == (arm.answer == "thought"), got
    assert bool(got["calls"]) == (arm.answer not in ("text", "thought")), got
    return {"us_per_token": used * 1e6 / (STREAMS * NEW_TOKENS), **got}


def rows_of(runs: Runs) -> list[Row]:
    """Return the CPU time and the first token of each arm, and both over those of plain text."""
    terms = Terms(work=f"{STREAMS} streams of {NEW_TOKENS} tokens, a step of 15 ms")
    rows = []
    for name in (name for name in ARMS if name != "again"):
        sides = {name: terms} | ({} if name == "plain" else {"plain": terms})
        rows.extend(_figures(name, runs, sides))
    return rows


def _figures(name: str, runs: Runs, sides: Mapping[str, Terms]) -> Iterator[Row]:
    one = {name: sides[name]}
    cpu, waits, chunks = (_column(runs, name, metric) for metric in ("us_per_token", "first_token_seconds", "chunks"))
    yield _row(f"{name}_us_per_token", median(cpu), "us", one)
    yield _row(f"{name}_first_token_ms", 1000 * median(waits), "ms", one)
    yield _row(f"{name}_chunks_per_token", median(chunks) / (STREAMS * NEW_TOKENS), "chunks", one)
    if name == "plain":
        return
    ratio, null = _over_plain(runs, name, "us_per_token")
    yield _row(f"{name}_over_plain", ratio, "ratio", sides, null)
    ratio, null = _over_plain(runs, name, "first_token_seconds")
    yield _row(f"{name}_first_token_over_plain", ratio, "ratio", sides, null)
    yield _row(f"{name}_first_token_beyond_null_interval", max(0.0, ratio - null[1]), "ratio", sides)


def _row(
    metric: str, value: float, unit: str, terms: Mapping[str, Terms], null: tuple[float, float] | None = None
) -> Row:
    peer = "plain text" if "plain" in terms and len(terms) > 1 else None
    return row("dialects_cpu", metric, round(value, 4), unit, peer, terms=terms, null=null)


def _over_plain(runs: Runs, name: str, metric: str) -> tuple[float, tuple[float, float]]:
    """Return the median ratio over plain text, and the interval of plain text over itself."""
    plain = _column(runs, "plain", metric)
    ratios = [own / other for own, other in zip(_column(runs, name, metric), plain, strict=True)]
    return median(ratios), null_interval(_column(runs, "again", metric), plain)


def _column(runs: Runs, name: str, metric: str) -> list[float]:
    return [run[name][metric] for run in runs]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS)
