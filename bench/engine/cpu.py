"""Tokens per second and time to first token on the CPU, in bfloat16, compared with openvino-genai and vLLM.

Peers run if QUIRE_OPENVINO_PYTHON and QUIRE_VLLM_PYTHON name Python interpreters with them; OPENVINO_MODEL and
VLLM_MODEL name folders with the model in their formats. All alternate in each repetition; prefix caching is off. In
each repetition the machine's own limits are measured too: its memory bandwidth, and its products without loads. The
ceiling of a workload follows from them, and from what its matrices, keys and values cost.
"""

import random
from dataclasses import replace
from statistics import median
from time import perf_counter

from rich.progress import Progress

from bench.loads.ceiling import MachineLimits, ModelCosts, measurement
from bench.loads.peer import PEERS, Peer
from bench.report.results import Row, publish, row
from engine.attention.llama_shape import LlamaShape
from engine.run.loop import Engine
from engine.schedule.limits import Limits
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache, resolve
from tests.in_process import InProcessBlocks

REPETITIONS = 5
TOKEN_BUDGET = 2048
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
PEER_GOAL, CEILING_GOAL = 1.2, 0.85

Work = list[dict[str, object]]


def main() -> None:
    """Measure everything, and publish it."""
    folder = resolve("demo", default_cache(), lambda *_: None)
    kernels_folder = str(default_cache().parent / "kernels")
    settings = EngineSettings(model=str(folder), device_blocks=1024, kernels_folder=kernels_folder)
    parts = assemble(settings)
    plain = assemble(replace(settings, dtype="float32", attention_backend="torch"))
    works = {name: work_of(parts.loaded.vocabulary_size, *lengths) for name, lengths in WORKLOADS.items()}
    shape = parts.loaded.shape or LlamaShape.of(parts.loaded.model)  # the first start of a class has no shape yet
    costs, measure = ModelCosts.of(shape), measurement(load_kernels(kernels_folder))
    seconds: dict[str, dict[str, list[float]]] = {}
    steps: list[float] = []
    limits: list[MachineLimits] = []
    with (
        Peer(PEERS / "openvino_tokens.py", "QUIRE_OPENVINO_PYTHON", works) as openvino,
        Peer(PEERS / "vllm_tokens.py", "QUIRE_VLLM_PYTHON", works) as vllm,
        Progress() as progress,
    ):
        task = progress.add_task("cpu", total=(REPETITIONS + 1) * len(works))
        for repetition in range(REPETITIONS + 1):  # the first warms up
            limits.append(measure())
            for name, work in works.items():
                figures = {"quire": _seconds(parts, work, steps if name == "b1" else [])}
                if name == PLAIN:
                    figures["torch"] = _seconds(plain, work, [])
                for peer in (openvino, vllm):
                    if found := peer.measure(name):
                        figures[peer.label] = found["seconds"]
                figures["ceiling"] = costs.least_seconds(*WORKLOADS[name], TOKEN_BUDGET, limits[-1])
                if repetition:
                    for label, spent in figures.items():
                        seconds.setdefault(name, {}).setdefault(label, []).append(spent)
                progress.advance(task)
        names = {"openvino": openvino.name, "vllm": vllm.name}
    rows = [one for name in works for one in _rows(name, seconds[name], names)]
    bandwidth = median(one.bandwidth for one in limits)
    rows += [
        row(
            "cpu",
            f"{PLAIN}_over_torch",
            speed_ratio(seconds[PLAIN]["torch"], seconds[PLAIN]["quire"]),
            "ratio",
            "torch",
        ),
        row("cpu", "read_bandwidth", round(bandwidth / 1e9, 2), "GB/s"),
        row("cpu", "operations", round(median(one.operations for one in limits) / 1e9, 1), "GFLOP/s"),
        row(
            "cpu",
            "b1_of_the_bandwidth_roofline",
            round(costs.matrices / bandwidth / median(steps), 3),
            "ratio",
            "memory",
        ),
    ]
    publish("cpu", rows, REPETITIONS, seconds=seconds, peers=names, step_seconds_b1=steps, limits=limits)


def _rows(name: str, seconds: dict[str, list[float]], peers: dict[str, str | None]) -> list[Row]:
    rows = [_figure(name, label, seconds.get(label), peers) for label in ("quire", *peers)]
    theirs = [min(times) for times in zip(*(seconds[label] for label in peers if label in seconds), strict=True)]
    better = "the better peer" if all(peers.values()) else "not all peers ran"
    over_peer = speed_ratio(theirs, seconds["quire"])
    of_ceiling = speed_ratio(seconds["ceiling"], seconds["quire"])
    goal = None if over_peer is None or of_ceiling is None else max(over_peer / PEER_GOAL, of_ceiling / CEILING_GOAL)
    return [
        *rows,
        row("cpu", f"{name}_over_the_better_peer", over_peer, "ratio", better),
        row("cpu", f"{name}_of_the_ceiling", of_ceiling, "ratio", "memory and products of the machine"),
        row("cpu", f"{name}_of_its_goal", goal and round(goal, 3), "ratio", better),
    ]


def _figure(name: str, label: str, seconds: list[float] | None, peers: dict[str, str | None]) -> Row:
    """Return the tokens per second of a program, or its time to the first token."""
    lengths, tokens = WORKLOADS[name]
    who = None if label == "quire" else peers[label] or f"{label} did not run"
    if name.startswith("first_token"):
        return row("cpu", f"{name}_{label}_ms", round(median(seconds) * 1e3, 1) if seconds else None, "ms", who)
    rate = len(lengths) * tokens / median(seconds) if seconds else None
    return row("cpu", f"{name}_{label}_tokens_per_second", rate and round(rate, 1), "1/s", who)


def speed_ratio(theirs: list[float], ours: list[float]) -> float | None:
    """Return our speed over theirs: the median over repetitions. None without any of theirs."""
    return round(median(their / our for their, our in zip(theirs, ours, strict=True)), 3) if theirs else None


def work_of(vocabulary: int, lengths: tuple[int, ...], tokens: int) -> Work:
    """Return requests with prompts of random tokens of these lengths, and so many tokens of output each."""
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
