"""Prefix-aware routing by routers of other stacks: hit rates of two engines on the sessions of agents.

Arms: our gateway over two engines; smg over two engines by gRPC, which receives their KV events; vllm-router over two
gateways with an engine each, of which it sees the text of requests only. The engines compute nothing, but their
servers, schedulers and pools are real. All arms get the same prompts at the same times, over HTTP, as chats: text,
because smg and vllm-router tokenize or compare it themselves. A repetition runs each arm once, in an order that
changes, our gateway once more, and once with requests to its engines in turn, for comparison. The hit rate is that of
the engines: cached prompt tokens over all.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.loads.memory import DATA_VARIABLE, DataMissing
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from services.gateway.fleet.routing import RoutingPolicy
from services.loadgen.clients.target import Target
from services.loadgen.run import measure
from services.loadgen.statistics import Objectives
from services.loadgen.workload.arrivals import Random
from services.loadgen.workload.load import Bounds, Load
from services.loadgen.workload.selection import Selection
from services.loadgen.workload.workloads import Recorded
from services.models.model_store import default_cache, resolve
from tests.acceptance.running_routers import RunningRouter
from tests.acceptance.running_smg import RunningSmg
from tests.running_quire import RunningService
from tests.scrape import Scrape

ENGINES = 2
MODEL = "demo"
BLOCKS = 2048
REPETITIONS = 5
SPEEDUP = 8.0
# Of the trace: time of a computed token, and sessions that begin in a second.
MICROSECONDS_PER_TOKEN = 150.0
SESSIONS_PER_SECOND = 0.2
COPIES = 6
WINDOW_SECONDS = 60.0
PROMPT_SEED, ARRIVAL_SEED = 7, 1
VOCABULARY = 49_152
GATEWAY, AGAIN, IN_TURN = "gateway", "again", "round_robin"
CODE = (
    *("blocks", "engine/schedule", "kvmanager", "services", "protos", "bench/serving/routers.py"),
    *("bench/loads/null_engine.py", "tests/acceptance/running_routers.py", "tests/acceptance/running_smg.py"),
)


_BY_PREFIX = RoutingPolicy.PREFIX


class RoutedEngines(NamedTuple):
    """Running engines, and the URL of what routes requests to them."""

    url: str
    engines: Sequence[RunningService]


class HitRates(NamedTuple):
    """The result of an arm: the share of prompt tokens that engines had, the same by engine, and failed requests."""

    hit_rate: float
    of_engines: list[float]
    failed: int


@dataclass(frozen=True)
class Starter:
    """Starts services, which the stack stops."""

    stack: ExitStack
    folder: str

    def engines(self, *options: str) -> list[RunningService]:
        """Start a KV manager and the engines."""
        manager = self._service("kvmanager", "kvmanager")
        common = (
            "--kvmanager",
            manager.address,
            "--model",
            str(_tokenizer_folder()),
            "--model-name",
            MODEL,
            "--device-blocks",
            str(BLOCKS),
        )
        pace = ("--microseconds-per-token", str(MICROSECONDS_PER_TOKEN / SPEEDUP), "--vocabulary-size", str(VOCABULARY))
        module = "bench.loads.null_engine"
        engines = [
            self._service("engine", name, *common, *pace, *options, "--engine-id", name, module=module)
            for name in (f"e{number}" for number in range(ENGINES))
        ]
        for one in engines:
            one.output.wait_for("engine is ready")
        return engines

    def gateway(
        self, name: str, engines: Sequence[RunningService], policy: RoutingPolicy = RoutingPolicy.PREFIX
    ) -> str:
        """Start a gateway over engines, and return its URL."""
        addresses = ",".join(one.address for one in engines)
        window = ("--routing", policy.value, "--routing-window-seconds", str(WINDOW_SECONDS / SPEEDUP))
        http = ("--http-listen", "127.0.0.1:0")
        gateway = self._service("gateway", name, "--engines", addresses, *http, *window)
        gateway.output.wait_for("gateway is ready")
        return gateway.output.wait_for("gateway listens for HTTP at ").split(" at ")[1]

    def _service(self, label: str, name: str, *arguments: str, module: str = "") -> RunningService:
        listen = "127.0.0.1:0" if "--smg" in arguments else f"unix:{self.folder}/{name}.sock"
        return self.stack.enter_context(closing(RunningService(label, "--listen", listen, *arguments, module=module)))


def _quire(start: Starter) -> RoutedEngines:
    engines = start.engines()
    return RoutedEngines(start.gateway("gateway", engines), engines)


def _in_turn(start: Starter) -> RoutedEngines:
    engines = start.engines()
    return RoutedEngines(start.gateway("gateway", engines, RoutingPolicy.ROUND_ROBIN), engines)


def _smg(start: Starter) -> RoutedEngines:
    engines = start.engines("--smg")
    router = start.stack.enter_context(closing(RunningSmg([one.address for one in engines])))
    return RoutedEngines(router.url, engines)


def _vllm_router(start: Starter) -> RoutedEngines:
    engines = start.engines()
    workers = [start.gateway(f"gateway{number}", [one]) for number, one in enumerate(engines)]
    router = RunningRouter("vllm-router", workers, "--policy", "cache_aware")
    return RoutedEngines(start.stack.enter_context(closing(router)).url, engines)


ARMS: dict[str, Callable[[Starter], RoutedEngines]] = {
    GATEWAY: _quire,
    AGAIN: _quire,
    IN_TURN: _in_turn,
    "smg": _smg,
    "vllm_router": _vllm_router,
}


def main(repetitions: int) -> None:
    """Measure all arms, and publish."""
    outcomes: dict[str, list[HitRates]] = {name: [] for name in ARMS}
    for number in repeated(repetitions, "routers", warm_up=False):
        for name in in_turn(list(ARMS), number):
            outcomes[name].append(measured(ARMS[name]))
    found = {name: [one._asdict() for one in runs] for name, runs in outcomes.items()}
    publish("routers", rows_of(outcomes), repetitions, code=CODE, outcomes=found)


def measured(arm: Callable[[Starter], RoutedEngines]) -> HitRates:
    """Start the services of an arm, run the sessions, and return what the engines had."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        fleet = arm(Starter(stack, folder))
        target = Target("chat", fleet.url, MODEL, prompt_seed=PROMPT_SEED, vocabulary_size=VOCABULARY)
        summary = measure(target, _load(), 1, Objectives(), lambda *_: None).summary
        tokens = [_prompt_tokens(one) for one in fleet.engines]
    cached, all_tokens = (sum(one) for one in zip(*tokens, strict=True))
    failed = summary.requests - summary.completed
    return HitRates(cached / all_tokens, [own / total if total else 0.0 for own, total in tokens], failed)


def _load() -> Load:
    folder = os.environ.get(DATA_VARIABLE, "")
    if not folder:
        raise DataMissing(f"{DATA_VARIABLE} names no folder with agent_sessions.jsonl")
    workload = Recorded(Path(folder) / "agent_sessions.jsonl", Selection(max_input=7168, cap_output=64), COPIES)
    arrivals = Random(SESSIONS_PER_SECOND * SPEEDUP, seed=ARRIVAL_SEED, speedup=SPEEDUP)
    return Load(workload, arrivals, Bounds())


def _tokenizer_folder() -> Path:
    return resolve("demo", default_cache(), lambda *_: None)


def _prompt_tokens(engine: RunningService) -> tuple[float, float]:
    """Return an engine's cached prompt tokens and all."""
    shown = Scrape.of(engine.metrics_url)
    return shown.value("quire_prompt_tokens_cached_total"), shown.value("quire_prompt_tokens_total")


def rows_of(outcomes: dict[str, list[HitRates]]) -> list[Row]:
    """Return the rows: each arm's hit rate, and that of other routers over our gateway's."""
    terms = Terms(processes=ENGINES, work="sessions of agents", start="cold")  # no model computes
    rows = []
    for name, runs in outcomes.items():
        rate = round(median(one.hit_rate for one in runs), 4)
        rows.append(row("routers", f"{name}_hit_rate", rate, "share", terms={name: terms}))
        rows.append(
            row("routers", f"{name}_failed_requests", sum(one.failed for one in runs), "1", terms={name: terms})
        )
    own, again = ([one.hit_rate for one in outcomes[name]] for name in (GATEWAY, AGAIN))
    for name in [name for name in outcomes if name not in (GATEWAY, AGAIN)]:
        over = round(median(one.hit_rate for one in outcomes[name]) / median(own), 4)
        both = {name: terms, GATEWAY: terms}
        null = null_interval(own, again)
        rows.append(row("routers", f"{name}_over_gateway", over, "ratio", "our gateway", terms=both, null=null))
    return rows


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS)
