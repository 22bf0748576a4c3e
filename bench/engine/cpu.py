"""Tokens per second and time to first token on the CPU, all in bfloat16, compared with openvino-genai and vLLM.

Peers run if QUIRE_OPENVINO_PYTHON and QUIRE_VLLM_PYTHON name Python interpreters with them; OPENVINO_MODEL and
VLLM_MODEL name folders with the model in their formats. All take turns in each repetition, Quire twice, so that the
ratio of equal programs is known; prefix caching is off. In each repetition the machine's own limits are measured too:
its memory bandwidth, and its products without loads. The ceiling of a workload follows from them, and from what its
matrices, keys and values cost.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

from bench.loads.ceiling import MachineLimits, ModelCosts, measurement
from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of
from bench.loads.peer import PEERS, Peer
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.targets import device_of, targets
from bench.report.terms import Terms
from bench.report.verdict import goal, null_interval
from engine.attention.llama_shape import LlamaShape
from engine.run.loop import Engine
from engine.schedule.limits import Limits
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.startup.assembly import EngineParts
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache
from tests.in_process import InProcessBlocks

REPETITIONS = 5
TOKEN_BUDGET = 2048
DEVICE_BLOCKS = 1024
LIMITS = Limits(token_budget=TOKEN_BUDGET, max_sequences=64)
RAGGED = (16, 24, 40, 64, 90, 128, 180, 256, 360, 500, 640, 800, 1000, 1300, 1600, 2000)
# Tokens of each prompt and of each output, by workload.
WORKLOADS: dict[str, tuple[tuple[int, ...], int]] = {
    "b1": ((32,), 64),
    "b8": ((128,) * 8, 64),
    "b32": ((128,) * 32, 64),
    "b32_short": ((16,) * 32, 128),
    "ragged": (RAGGED, 64),
    "first_token_128": ((128,), 1),
    "first_token_1024": ((1024,), 1),
    "first_token_4096": ((4096,), 1),
}
# Compared with torch's operators in float32 too, which CPUs without kernels use.
PLAIN = "b8"
# Long enough to show how many cores each program uses.
LONG = "b32"
CODE = ("blocks", "engine", "kvmanager", "services/engine", "bench/engine/cpu.py", "bench/peers", "bench/loads")
_MACHINE = "memory and products of the machine"

Work = list[dict[str, object]]
# The seconds of a workload and the cores that it used, None for a peer that does not run.
Program = Callable[[str], "tuple[float, float | None] | None"]


@dataclass
class Timings:
    """What was measured: seconds and used cores by workload and program, one for each repetition."""

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    cores: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    limits: list[MachineLimits] = field(default_factory=list)

    def add(self, workload: str, program: str, seconds: float, cores: float | None = None) -> None:
        """Record one repetition."""
        self.seconds.setdefault(workload, {}).setdefault(program, []).append(seconds)
        self.cores.setdefault(workload, {}).setdefault(program, []).append(cores)


class PeerSide(NamedTuple):
    """A peer's terms, None if it did not run, and its name, or why it did not run.

    One that is left out cannot be compared in the class of CPUs, so that the better peer is among the others.
    """

    terms: Terms | None
    name: str
    left_out: bool = False


def main() -> None:
    """Measure everything, and publish it."""
    parts = demo_parts(DEVICE_BLOCKS, **BFLOAT16)
    plain = demo_parts(DEVICE_BLOCKS, dtype="float32", weights="auto", attention_backend="torch")
    works = {name: work_of(parts.loaded.vocabulary_size, *lengths) for name, lengths in WORKLOADS.items()}
    shape = parts.loaded.shape or LlamaShape.of(parts.loaded.model)  # the first start of a class has no shape yet
    costs, steps = ModelCosts.of(shape), list[float]()
    measure = measurement(load_kernels(str(default_cache().parent / "kernels")), costs.matrices)
    with (
        Peer(PEERS / "openvino_tokens.py", "QUIRE_OPENVINO_PYTHON", works, model="OPENVINO_MODEL") as openvino,
        Peer(PEERS / "vllm_tokens.py", "QUIRE_VLLM_PYTHON", works, model="VLLM_MODEL") as vllm,
    ):
        peers = (openvino, vllm)
        programs = {
            "quire": _program(parts, works, steps),
            "again": _program(parts, works, []),
            **{peer.label: program_of(peer) for peer in peers},
            "torch": _program(plain, {PLAIN: works[PLAIN]}, []),
        }
        run = measured(programs, costs, measure, REPETITIONS)
        sides = {peer.label: side_of(peer, "") for peer in peers}
    steps = steps[len(steps) // (REPETITIONS + 1) :]  # without those of the warm-up
    ours, theirs = terms_of(parts, ""), terms_of(plain, "")
    rows = [one for name in works for one in workload_rows(name, run.seconds[name], ours, sides)]
    rows += of_class(device_of("cpu"), rows)
    rows += [*_against_torch(run.seconds[PLAIN], ours, theirs), *_machine_rows(run, costs, steps, ours)]
    rows += _cores_rows(run.cores[LONG])
    names = {label: side.name if side.terms else None for label, side in sides.items()}
    more: dict[str, Any] = {"seconds": run.seconds, "cores_used": run.cores, "limits": run.limits, "peers": names}
    publish("cpu", rows, REPETITIONS, code=CODE, step_seconds_b1=steps, **more)


def measured(
    programs: Mapping[str, Program], costs: ModelCosts, measure: Callable[[], MachineLimits], repetitions: int
) -> Timings:
    """Run all workloads with all programs in turn in each repetition, after one that warms up."""
    run = Timings()
    for number in repeated(repetitions, "cpu"):
        limits = measure()
        run.limits += [limits] if number else []
        for name in WORKLOADS:
            for label in in_turn([*programs], number):
                found = programs[label](name)
                if number and found:
                    run.add(name, label, *found)
            if number:
                run.add(name, "ceiling", costs.least_seconds(*WORKLOADS[name], TOKEN_BUDGET, limits))
    return run


def _program(parts: EngineParts, works: Mapping[str, Work], steps: list[float]) -> Program:
    """Return an engine in this process as a program for these workloads; `steps` gets the decoding steps of b1."""

    def run(name: str) -> tuple[float, float | None] | None:
        if name not in works:
            return None
        used = process_time()
        seconds = _seconds(parts, works[name], steps if name == "b1" else [])
        return seconds, round((process_time() - used) / seconds, 2)

    return run


def program_of(peer: Peer) -> Program:
    """Return a peer as a program."""

    def run(name: str) -> tuple[float, float | None] | None:
        found = peer.measure(name)
        return None if found is None else (found["seconds"], peer.cores_used)

    return run


def side_of(peer: Peer, work: str) -> PeerSide:
    """Return the side of a peer in comparisons."""
    return PeerSide(peer.terms(work).get(peer.label), peer.name or peer.missing, peer.left_out)


def workload_rows(
    name: str, seconds: Mapping[str, list[float]], ours: Terms, sides: Mapping[str, PeerSide]
) -> list[Row]:
    """Return the rows of a workload: figures of all, and ratios to each peer, the better of them, and the ceiling.

    Without one of the peers there is no better one, unless it is left out of the class. Raises UnequalTerms if a peer
    has other terms than Quire.
    """
    terms = {"quire": ours} | {label: side.terms for label, side in sides.items() if side.terms}
    terms = {label: replace(one, work=name) for label, one in terms.items()}
    own, null = seconds["quire"], null_interval(seconds["quire"], seconds["again"])
    compared = {label: side for label, side in sides.items() if not side.left_out}
    missing = next((side.name for side in compared.values() if not side.terms), None)
    best = [] if missing else [min(times) for times in zip(*(seconds[label] for label in compared), strict=True)]
    over_peer, of_ceiling = speed_ratio(best, own), speed_ratio(seconds["ceiling"], own)
    reached, by = goal(over_peer, of_ceiling)
    of_ours = {"quire": terms["quire"]}
    alone = next(iter(compared.values())).name if len(compared) == 1 else None
    peer = missing or alone or "the better peer"
    made = [figure("cpu", f"{name}_quire", name, own, None, of_ours)]
    for label, side in sides.items():
        both = {one: terms[one] for one in ("quire", label) if one in terms}
        ran = seconds.get(label, [])
        made.append(figure("cpu", f"{name}_{label}", name, ran, side.name, {label: terms[label]} if ran else {}))
        ratio = speed_ratio(ran, own)
        made.append(row("cpu", f"{name}_over_{label}", ratio, "ratio", side.name, terms=both, null=null))
    return [
        *made,
        row("cpu", f"{name}_over_the_better_peer", over_peer, "ratio", peer, terms=terms, null=null),
        row("cpu", f"{name}_of_the_ceiling", of_ceiling, "ratio", _MACHINE, terms=of_ours, null=null, limit=True),
        row("cpu", f"{name}_of_its_goal", reached, "ratio", peer, terms=terms, null=null, by=by),
    ]


def of_class(device: str, rows: Sequence[Row]) -> list[Row]:
    """Return the ratios that have a target of this class of CPUs, under its name."""
    named = {f"{device.replace('-', '_')}_{one.metric}": one for one in rows}
    return [
        row("cpu", metric, one.value, one.unit, one.peer, terms=one.terms, null=one.null, limit=one.limit)
        for metric, one in named.items()
        if metric in targets()["cpu"]
    ]


def figure(
    benchmark: str, metric: str, workload: str, seconds: Sequence[float], who: str | None, terms: Mapping[str, Terms]
) -> Row:
    """Return a program's tokens per second, or its time to the first token, under the beginning of a metric's name.

    The row has no value if the program did not run.
    """
    lengths, tokens = WORKLOADS[workload]
    if workload.startswith("first_token"):
        value = round(median(seconds) * 1e3, 1) if seconds else None
        return row(benchmark, f"{metric}_ms", value, "ms", who, terms=terms)
    rate = round(len(lengths) * tokens / median(seconds), 1) if seconds else None
    return row(benchmark, f"{metric}_tokens_per_second", rate, "1/s", who, terms=terms)


def speed_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float | None:
    """Return our speed over theirs: the median over repetitions. None without any of theirs."""
    return round(median(their / our for their, our in zip(theirs, ours, strict=True)), 3) if theirs else None


def _against_torch(seconds: Mapping[str, list[float]], ours: Terms, theirs: Terms) -> list[Row]:
    terms = {"quire": replace(ours, work=PLAIN), "torch": replace(theirs, work=PLAIN)}
    null = null_interval(seconds["quire"], seconds["again"])
    ratio = speed_ratio(seconds["torch"], seconds["quire"])
    return [row("cpu", f"{PLAIN}_over_torch_float32", ratio, "ratio", "torch", terms=terms, null=null)]


def _machine_rows(run: Timings, costs: ModelCosts, steps: Sequence[float], ours: Terms) -> list[Row]:
    """Return the machine's limits, and how much of its bandwidth a step of one sequence reaches."""
    bandwidth = median(one.bandwidth for one in run.limits)
    operations = median(one.operations for one in run.limits)
    share = round(costs.matrices / bandwidth / median(steps), 3)
    terms, null = (
        {"quire": replace(ours, work="b1")},
        null_interval(run.seconds["b1"]["quire"], run.seconds["b1"]["again"]),
    )
    return [
        row("cpu", "read_bandwidth", round(bandwidth / 1e9, 2), "GB/s"),
        row("cpu", "operations", round(operations / 1e9, 1), "GFLOP/s"),
        row("cpu", "b1_of_the_bandwidth_roofline", share, "ratio", "memory", terms=terms, null=null, limit=True),
    ]


def _cores_rows(cores: Mapping[str, Sequence[float | None]]) -> list[Row]:
    """Return the cores that each program used: CPU time divided by wall time."""
    known = {label: [one for one in used if one is not None] for label, used in cores.items()}
    return [
        row("cpu", f"{LONG}_{label}_cores_used", round(median(used), 2), "cores")
        for label, used in known.items()
        if used
    ]


def work_of(vocabulary: int, lengths: tuple[int, ...], tokens: int) -> Work:
    """Return requests of `tokens` output tokens, whose prompts are random tokens of these lengths."""
    draw = random.Random(1)
    return [{"prompt": [draw.randrange(10, vocabulary) for _ in range(length)], "tokens": tokens} for length in lengths]


def _seconds(parts: EngineParts, work: Work, steps: list[float]) -> float:
    """Run a workload in an engine with an empty cache; return its seconds, and record those of each decoding step."""
    scheduler = Scheduler(parts.scheduler.capacity, LIMITS)
    engine = Engine(scheduler, parts.runner, InProcessBlocks(scheduler.capacity), perf_counter)
    for number, item in enumerate(work):
        prompt, tokens = item["prompt"], item["tokens"]
        assert isinstance(prompt, list)
        assert isinstance(tokens, int)
        scheduler.requests.submit(Request(f"r{number}", tuple(prompt), Sampling(temperature=0.0), Stopping(tokens)))
    begun = perf_counter()
    while not scheduler.empty:
        before, turned = scheduler.totals.generated_tokens, perf_counter()
        engine.turn()
        if 0 < before < scheduler.totals.generated_tokens:
            steps.append(perf_counter() - turned)
    return perf_counter() - begun


if __name__ == "__main__":
    main()
