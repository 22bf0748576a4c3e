"""Routing of sessions: hit rates and loads of three engines behind one gateway, by policy and size of pool.

The engines compute nothing, but their servers, schedulers and pools are real, as are gateway and KV manager. Requests
are those of `quire bench serve`. Trace and engines run at the same speedup. The baseline is one engine with three times
the pool, for which routing makes no difference. Hits depend on the times at which requests end, so that runs differ; a
run takes most of an hour, so there is one.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from bench.loads.engine_loads import LoadSamples, most_over_mean
from bench.loads.memory import DATA_VARIABLE, DataMissing
from bench.report.results import Row, publish, repeated, row
from bench.report.terms import Terms
from services.gateway.fleet.routing import RoutingPolicy
from services.loadgen.clients.target import Target
from services.loadgen.driver import Progress
from services.loadgen.run import Run, completed_by, describe, measure
from services.loadgen.statistics import Objectives
from services.loadgen.workload.arrivals import Arrivals, Random, TraceTimes
from services.loadgen.workload.load import Bounds, Load
from services.loadgen.workload.selection import Selection
from services.loadgen.workload.workloads import Recorded
from services.models.model_store import default_cache, resolve
from tests.running_quire import RunningService
from tests.scrape import Scrape

ENGINES = 3
WINDOW_SECONDS = 60.0
PROMPT_SEED = 7
SEED = 1
REPETITIONS = 1
CODE = (
    *("blocks", "engine/schedule", "kvmanager", "services", "protos", "bench/serving/routing.py"),
    *(
        "bench/loads/null_engine.py",
        "bench/loads/engine_loads.py",
    ),
)
_LATER_SECONDS = 1e-6


@dataclass(frozen=True)
class RoutedWorkload:
    """A workload, its speedup, and the sizes of pools for it.

    microseconds_per_token: time of a computed token, in the trace's time.
    """

    name: str
    file: str
    selection: Selection
    copies: int
    sessions_per_second: float | None
    speedup: float
    microseconds_per_token: float
    pools: tuple[int, ...]

    def load(self) -> Load:
        """Return the load."""
        folder = os.environ.get(DATA_VARIABLE, "")
        if not folder:
            raise DataMissing(f"{DATA_VARIABLE} names no folder with {self.file}")
        arrivals: Arrivals = TraceTimes(self.speedup)
        if self.sessions_per_second is not None:
            arrivals = Random(self.sessions_per_second * self.speedup, seed=SEED, speedup=self.speedup)
        return Load(Recorded(Path(folder) / self.file, self.selection, self.copies), arrivals, Bounds())


CASES = (
    RoutedWorkload(
        "sessions", "agent_sessions.jsonl", Selection(max_input=7168), 10, 0.2, 4.0, 150.0, (768, 1024, 2048)
    ),
    RoutedWorkload(
        "conversation", "mooncake_conversation.jsonl", Selection(limit=2000, cap_output=8), 1, None, 10.0, 0.0, (65536,)
    ),
)


@dataclass(frozen=True)
class Fleet:
    """Engines with equal pools behind a gateway."""

    policy: RoutingPolicy
    engines: int
    blocks: int


@dataclass(frozen=True)
class Outcome:
    """The result of a workload on a fleet.

    most_load: the largest load of an engine in a window over the mean of all. stretch: duration over the trace's; far
    above 1 the machine was too slow, and too many sessions ran at once.
    """

    hit_rate: float
    most_load: float | None
    stretch: float
    most_in_flight: int
    completed: int
    failures: dict[str, int]
    windows: list[list[float]]


def main() -> None:
    """Measure all fleets with all workloads, and publish the results."""
    cases = [(case, fleet) for case in CASES for fleet in _fleets(case)]
    outcomes = dict[str, Outcome]()
    for _ in repeated(REPETITIONS, "routing", warm_up=False):
        for case, fleet in cases:
            outcomes[_name(case, fleet)] = _measured(case, fleet)
    rows = [one for case in CASES for one in _rows(case, outcomes)]
    found = {name: vars(outcome) for name, outcome in outcomes.items()}
    publish("routing", rows, REPETITIONS, code=CODE, outcomes=found)


def _fleets(case: RoutedWorkload) -> list[Fleet]:
    return [
        fleet
        for blocks in case.pools
        for fleet in (
            Fleet(RoutingPolicy.PREFIX, 1, ENGINES * blocks),
            *(Fleet(one, ENGINES, blocks) for one in RoutingPolicy),
        )
    ]


def _name(case: RoutedWorkload, fleet: Fleet) -> str:
    if fleet.engines == 1:
        return f"{case.name}_{fleet.blocks // ENGINES}_one_engine"
    return f"{case.name}_{fleet.blocks}_{fleet.policy.value.replace('-', '_')}"


def _measured(case: RoutedWorkload, fleet: Fleet) -> Outcome:
    load = case.load()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        gateway, engines = _start(stack, case, fleet, folder)
        samples = LoadSamples()

        def seen(seconds: float, _: Sequence[Progress]) -> None:
            if seconds > (samples.moments[-1] + _LATER_SECONDS if samples.moments else 0):
                samples.add(seconds, [_work(engine) for engine in engines])

        target = Target("grpc", gateway.address, prompt_seed=PROMPT_SEED)
        run = measure(completed_by(target, describe(target)), load, 1, Objectives(), seen)
    return _outcome(run, samples, WINDOW_SECONDS / case.speedup)


def _trace_seconds(load: Load) -> float:
    """Return the time of the last call if calls took no time."""
    speedup = load.arrivals.speedup
    return max(one.start + one.session.calls[-1].offset_seconds / speedup for one in load.planned())


def _outcome(run: Run, samples: LoadSamples, width: float) -> Outcome:
    """Compute the figures of a run; loads are of whole windows in which sessions started."""
    windows = samples.windows(width, max(planned.start for planned in run.load.planned()))
    summary = run.summary
    return Outcome(
        summary.prefix_hit_rate or 0.0,
        most_over_mean(windows),
        run.records[-1].sent / _trace_seconds(run.load),
        summary.most_in_flight,
        summary.completed,
        summary.failures,
        [[round(float(one)) for one in window] for window in windows],
    )


def _start(
    stack: ExitStack, case: RoutedWorkload, fleet: Fleet, folder: str
) -> tuple[RunningService, list[RunningService]]:
    """Start a KV manager, the engines and a gateway for all of them."""

    def start(label: str, name: str, *arguments: str, module: str = "") -> RunningService:
        listen = ("--listen", f"unix:{folder}/{name}.sock")
        return stack.enter_context(closing(RunningService(label, *listen, *arguments, module=module)))

    kvmanager = start("kvmanager", "kvmanager").address
    of_engine = (
        *("--kvmanager", kvmanager, "--model", str(_tokenizer_folder()), "--device-blocks", str(fleet.blocks)),
        *("--microseconds-per-token", str(case.microseconds_per_token / case.speedup)),
    )
    names = [f"e{number}" for number in range(fleet.engines)]
    engines = [
        start("engine", name, *of_engine, "--engine-id", name, module="bench.loads.null_engine") for name in names
    ]
    gateway = start(
        "gateway",
        "gateway",
        *("--engines", ",".join(engine.address for engine in engines), "--kvmanager", kvmanager),
        *("--routing", fleet.policy.value, "--routing-window-seconds", str(WINDOW_SECONDS / case.speedup)),
    )
    for engine in engines:
        engine.output.wait_for("engine is ready")
    gateway.output.wait_for("gateway is ready")
    return gateway, engines


def _tokenizer_folder() -> Path:
    return resolve("demo", default_cache(), lambda *_: None)


def _work(engine: RunningService) -> float:
    """Return the tokens that an engine has computed for prompts, and those that it has generated."""
    shown = Scrape.of(engine.metrics_url)
    prompts = shown.value("quire_prompt_tokens_total") - shown.value("quire_prompt_tokens_cached_total")
    return prompts + shown.value("quire_generation_tokens_total")


def _rows(case: RoutedWorkload, outcomes: dict[str, Outcome]) -> list[Row]:
    rows = []
    terms = Terms(processes=3, work=case.name, start="cold")  # no model computes
    peer = "one engine, three times the pool"
    one, both = {"one engine": terms}, {"three engines": terms, "one engine": terms}
    for blocks in case.pools:
        alone = outcomes[f"{case.name}_{blocks}_one_engine"]
        rows.append(
            row("routing", f"{case.name}_{blocks}_one_engine_hit_rate", round(alone.hit_rate, 4), "share", terms=one)
        )
        for policy in RoutingPolicy:
            name = _name(case, Fleet(policy, ENGINES, blocks))
            outcome = outcomes[name]
            over = round(outcome.hit_rate / alone.hit_rate, 4) if alone.hit_rate else None
            most = None if outcome.most_load is None else round(outcome.most_load, 3)
            rows.append(
                row("routing", f"{name}_hit_rate", round(outcome.hit_rate, 4), "share", terms={"three engines": terms})
            )
            rows.append(row("routing", f"{name}_over_one_engine", over, "ratio", peer, terms=both))
            rows.append(row("routing", f"{name}_most_load", most, "ratio", "mean of the engines", terms=both))
    return rows


if __name__ == "__main__":
    main()
