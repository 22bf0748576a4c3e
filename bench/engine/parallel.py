"""The control path of several ranks: the plan of a step as a message, the time waiting, and tokens per second.

The message: 256 sequences decode, and each plan is encoded, sent to another process over a rank's link, and decoded
there. Ranks: an engine of 1, 2 and 4 ranks on a small random model, in float32 with torch's operators. They share
the cores of this machine, so more ranks are not faster here.
"""

import multiprocessing
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.loads.engine_worker import model_terms
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from engine.model.loaded import dtype_name
from engine.parallel.plan_message import PlanDecoder, PlanEncoder
from engine.run.loop import Engine
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Done, Launched, Sampled, StepPlan
from services.engine.ranks.link import Kind, RankLink
from services.engine.ranks.start import assemble
from services.engine.settings import EngineSettings
from services.engine.startup.parts import Parts
from tests.in_process import InProcessBlocks

REPETITIONS = 5
CODE = ("blocks", "engine", "kvmanager", "services/engine", "bench/engine/parallel.py")
SIZES = (1, 2, 4)
SEQUENCES, CONTEXT, STEPS = 256, 1024, 40
BLOCK_SIZE = 16
STEP_SECONDS = 0.02
LOAD, NEW_TOKENS = 32, 32
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


def main() -> None:
    """Measure the message, then all sizes in each repetition, and publish medians."""
    plans = _decoding_plans()
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    messages: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, _engines(Path(folder)) as engines:
        terms = {size: Terms(**engine.recv()) for size, engine in engines.items()}
        named = {str(size): size for size in SIZES}
        for number in repeated(REPETITIONS, "parallel"):
            message = _measure_message(plans)
            measured = {}
            for size in map(named.__getitem__, in_turn([*named], number)):
                engines[size].send("measure")
                measured[size] = engines[size].recv()
            if number:
                messages.append(message)
                for size, run in measured.items():
                    runs[size].append(run)
    rows = [*_message_rows(messages), *_rank_rows(runs, terms)]
    publish("parallel", rows, REPETITIONS, code=CODE, messages=messages, runs=runs)


def _message_rows(messages: list[dict[str, float]]) -> list[Row]:
    found = {name: median(one[name] for one in messages) for name in messages[0]}
    control, terms = found["encode"] + found["send"], {"sender": Terms(processes=2, work=f"{SEQUENCES} sequences")}
    return [
        row("parallel", "message_bytes", round(found["bytes"]), "B", terms=terms),
        row("parallel", "encode_us", round(found["encode"] * 1e6, 1), "us", terms=terms),
        row("parallel", "send_us", round(found["send"] * 1e6, 1), "us", terms=terms),
        row("parallel", "decode_us", round(found["decode"] * 1e6, 1), "us", terms=terms),
        row("parallel", "control_of_step", round(control / STEP_SECONDS, 4), "ratio", "a step of 20 ms", terms=terms),
    ]


def _rank_rows(runs: dict[int, list[dict[str, float]]], terms: dict[int, Terms]) -> list[Row]:
    rows = []
    for size, measured in runs.items():
        names = ("tokens_per_second", "plan_bytes", "wait_share", "rest_share")
        units = ("1/s", "B", "ratio", "ratio")
        own = {"quire": terms[size]}
        rows += [
            row("parallel", f"{name}_{size}", round(median(one[name] for one in measured), 3), unit, terms=own)
            for name, unit in zip(names, units, strict=True)
        ]
    return rows


# The message


class _Recorder:
    """A runner that keeps the plans, and samples token 0."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Launched:
        """Keep the plan."""
        self.plans.append(plan)
        return Done([Sampled(0) for work in plan.work if work.samples for _ in work.sample_indices])


def _decoding_plans() -> list[StepPlan]:
    """Return the plans of 256 sequences that decode after prompts of about 1,024 tokens."""
    blocks = SEQUENCES * (CONTEXT + 2 * STEPS + SEQUENCES) // BLOCK_SIZE
    capacity = Capacity(4 * CONTEXT, MODEL["vocab_size"], BLOCK_SIZE, blocks)
    recorder = _Recorder()
    scheduler = Scheduler(capacity, Limits(token_budget=16 * CONTEXT, max_sequences=SEQUENCES))
    engine = Engine(scheduler, recorder, InProcessBlocks(capacity), perf_counter)
    for number in range(SEQUENCES):
        prompt = tuple((number + place) % MODEL["vocab_size"] for place in range(CONTEXT + number % BLOCK_SIZE))
        stopping = Stopping(STEPS + SEQUENCES)
        scheduler.requests.submit(Request(f"r{number}", prompt, Sampling(temperature=0.0), stopping))
    full: list[StepPlan] = []
    while len(full) < STEPS:
        engine.turn()
        full = [plan for plan in recorder.plans if sum(len(one.token_ids) == 1 for one in plan.work) == SEQUENCES]
    return full


def _measure_message(plans: list[StepPlan]) -> dict[str, float]:
    """Return the medians of bytes and seconds over all plans but the first, whose tables are sent whole."""
    ours, theirs = socket.socketpair()
    spawning = multiprocessing.get_context("fork")
    results = spawning.SimpleQueue()
    receiver = spawning.Process(target=_receive, args=(theirs, results), daemon=True)
    receiver.start()
    theirs.close()
    link, encoder = RankLink(ours, "the receiver"), PlanEncoder()
    sizes, encoding, sending = [], [], []
    for plan in plans:
        begun = perf_counter()
        message = encoder.encode(plan, shares_tokens=False)
        encoded = perf_counter()
        link.send(Kind.PLAN, message)
        sent = perf_counter()
        assert link.receive() is not None  # the next step begins after this one
        sizes.append(len(message))
        encoding.append(encoded - begun)
        sending.append(sent - encoded)
    link.close()
    decoding = results.get()
    receiver.join()
    return {
        "bytes": median(sizes[1:]),
        "encode": median(encoding[1:]),
        "send": median(sending[1:]),
        "decode": median(decoding[1:]),
    }


def _receive(connection: socket.socket, results: "multiprocessing.SimpleQueue[list[float]]") -> None:
    """Body of the process that receives plans as a rank does."""
    link, decoder, seconds = RankLink(connection, "the sender"), PlanDecoder(), []
    while (message := link.receive()) is not None:
        begun = perf_counter()
        decoder.decode(message.body)
        seconds.append(perf_counter() - begun)
        link.send(Kind.LAUNCHED)
    results.put(seconds)


# The ranks


@contextmanager
def _engines(folder: Path) -> Iterator[dict[int, Connection]]:
    """Start an engine of each size on one random model, in processes that measure for each message."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)).save_pretrained(folder)
    spawning = multiprocessing.get_context("spawn")
    engines, processes = {}, []
    for size in SIZES:
        engines[size], theirs = spawning.Pipe()
        processes.append(spawning.Process(target=_run_engine, args=(folder, size, theirs)))
        processes[-1].start()
        theirs.close()
    try:
        yield engines
    finally:
        for connection in engines.values():
            connection.close()
        for process in processes:
            process.join()


def _run_engine(folder: Path, size: int, connection: Connection) -> None:
    """Body of an engine's process: send its terms, then measure for each message until the connection ends."""
    parts = assemble(
        EngineSettings(
            model=str(folder),
            device="cpu",
            dtype="float32",
            attention_backend="torch",
            device_blocks=512,
            tensor_parallel=size,
            threads=1,
        )
    )
    loaded: Any = parts.loaded
    formats = dtype_name(loaded.dtype), loaded.weight_format, dtype_name(loaded.cache_dtype)
    threads = size * torch.get_num_threads()
    connection.send(asdict(model_terms(*formats, work=f"{LOAD} requests", threads=threads, processes=size)))
    with suppress(EOFError):
        while True:
            connection.recv()
            connection.send(_measure_ranks(parts))
    if parts.ranks:
        parts.ranks.close()


def _measure_ranks(parts: Parts) -> dict[str, float]:
    """Run 32 requests; return tokens per second, and how the time of rank 0 was spent."""
    before = parts.ranks.stats() if parts.ranks else None
    scheduler = Scheduler(parts.scheduler.capacity, parts.scheduler.limits)
    engine = Engine(scheduler, parts.runner, InProcessBlocks(scheduler.capacity), perf_counter)
    for number in range(LOAD):
        prompt = tuple((31 * number + place) % MODEL["vocab_size"] for place in range(64))
        scheduler.requests.submit(Request(f"r{number}", prompt, Sampling(temperature=0.0), Stopping(NEW_TOKENS)))
    begun = perf_counter()
    while not scheduler.empty:
        engine.turn()
    seconds = perf_counter() - begun
    found = {"tokens_per_second": LOAD * NEW_TOKENS / seconds, "plan_bytes": 0.0, "wait_share": 0.0}
    if parts.ranks and before:
        after = parts.ranks.stats()
        found["plan_bytes"] = (after.plan_bytes - before.plan_bytes) / (after.plans - before.plans)
        found["wait_share"] = (after.wait_seconds - before.wait_seconds) / seconds
    return found | {"rest_share": 1 - found["wait_share"]}


if __name__ == "__main__":
    main()
