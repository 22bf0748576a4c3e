"""Tokens per second on the CPU, in bfloat16, compared with openvino-genai and vLLM on the same prompts.

Peers run if QUIRE_OPENVINO_PYTHON and QUIRE_VLLM_PYTHON name Python interpreters with them; OPENVINO_MODEL and
VLLM_MODEL name folders with the model in their formats. All alternate in each repetition; prefix caching is off.
"""

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.progress import Progress

from bench.loads.peer import PEERS, Peer
from bench.report.results import Row, publish, row
from engine.native.kernels import Kernels
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
LIMITS = Limits(token_budget=2048, max_sequences=64)
RAGGED = (16, 24, 40, 64, 90, 128, 180, 256, 360, 500, 640, 800, 1000, 1300, 1600, 2000)
# Tokens of each prompt and of each output, by workload.
WORKLOADS: dict[str, tuple[tuple[int, ...], int]] = {
    "b1": ((32,), 64),
    "b8": ((128,) * 8, 64),
    "b32": ((128,) * 32, 64),
    "b32_short": ((16,) * 32, 128),
    "ragged": (RAGGED, 64),
}
READ_MIB = 512
READS = 5

Work = list[dict[str, object]]


def main() -> None:
    """Measure everything, and publish it."""
    folder = resolve("demo", default_cache(), lambda *_: None)
    kernels_folder = default_cache().parent / "kernels"
    parts = assemble(EngineSettings(model=str(folder), device_blocks=1024, kernels_folder=str(kernels_folder)))
    works = {name: _work(parts.loaded.vocabulary_size, *lengths) for name, lengths in WORKLOADS.items()}
    bandwidth = _bandwidth(load_kernels(str(kernels_folder)))
    seconds: dict[str, dict[str, list[float]]] = {}
    steps: list[float] = []
    read: list[float] = []
    with (
        Peer(PEERS / "openvino_tokens.py", "QUIRE_OPENVINO_PYTHON", works) as openvino,
        Peer(PEERS / "vllm_tokens.py", "QUIRE_VLLM_PYTHON", works) as vllm,
        Progress() as progress,
    ):
        task = progress.add_task("cpu", total=(REPETITIONS + 1) * len(works))
        for repetition in range(REPETITIONS + 1):  # the first warms up
            for name, work in works.items():
                figures = {"quire": _seconds(parts, work, steps if name == "b1" else [])}
                for peer in (openvino, vllm):
                    if found := peer.measure(name):
                        figures[peer.label] = found["seconds"]
                if repetition:
                    for label, spent in figures.items():
                        seconds.setdefault(name, {}).setdefault(label, []).append(spent)
                progress.advance(task)
            read.append(bandwidth())
        names = {"openvino": openvino.name, "vllm": vllm.name}
    rows = [one for name in works for one in _rows(name, seconds[name], names)]
    floor = _bytes_of_a_step(folder) / median(read)
    rows += [
        row("cpu", "read_bandwidth", round(median(read) / 1e9, 2), "GB/s"),
        row("cpu", "b1_of_the_bandwidth_roofline", round(floor / median(steps), 3), "ratio", "memory"),
    ]
    publish("cpu", rows, REPETITIONS, seconds=seconds, peers=names, step_seconds_b1=steps, read_bytes_per_second=read)


def _rows(name: str, seconds: dict[str, list[float]], peers: dict[str, str | None]) -> list[Row]:
    lengths, tokens = WORKLOADS[name]
    rows = []
    for label in ("quire", *peers):
        rate = len(lengths) * tokens / median(seconds[label]) if label in seconds else None
        who = None if label == "quire" else peers[label] or f"{label} did not run"
        rows.append(row("cpu", f"{name}_{label}_tokens_per_second", rate and round(rate, 1), "1/s", who))
    theirs = [min(times) for times in zip(*(seconds[label] for label in peers if label in seconds), strict=True)]
    ratio = median(their / ours for their, ours in zip(theirs, seconds["quire"], strict=True)) if theirs else None
    better = "the better peer" if all(peers.values()) else "not all peers ran"
    rows.append(row("cpu", f"{name}_over_the_better_peer", ratio and round(ratio, 3), "ratio", better))
    return rows


def _work(vocabulary: int, lengths: tuple[int, ...], tokens: int) -> Work:
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


def _bandwidth(kernels: Kernels) -> Callable[[], float]:
    """Return a measurement of the memory's bandwidth, with as many threads as the engine has.

    The memory has pages like those of weights and cache. The fastest of several reads counts.
    """
    memory = kernels.zeros((READ_MIB << 20,), torch.uint8).fill_(1)
    threads = torch.get_num_threads()

    def once() -> float:
        begun = perf_counter()
        kernels.read(memory, threads)
        return memory.nbytes / (perf_counter() - begun)

    def measure() -> float:
        return max(once() for _ in range(READS))

    return measure


def _bytes_of_a_step(folder: Path) -> int:
    """Return the bytes of the matrices that a step reads, in bfloat16; the embedding table is also the head."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 - not a dict
        total += sum(2 * rows[0] * rows[1] for rows in shapes if len(rows) == 2)
    return total


if __name__ == "__main__":
    main()
