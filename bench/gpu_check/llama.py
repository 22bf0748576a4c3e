"""A random model of Llama-3-8B's shape, end to end: the engine here, the KV manager in another process."""

import asyncio
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.gpu_check.ceilings import multiplying, reading
from bench.gpu_check.notes import Notes
from bench.gpu_check.timing import recorder, take_turns
from blocks import blocks_for
from engine.attention.interface import ATTENTION_NAME, register
from engine.gpu.graphs import RecordedDecoder
from engine.gpu.triton_backend import TritonBackend
from engine.model.decoder import ModulesDecoder
from engine.model.loaded import LoadedModel
from engine.model.loading import take
from engine.run.loop import Engine
from engine.run.runner import ModelRunner
from engine.schedule.limits import Limits
from engine.schedule.request import Capacity, Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Launched, StepPlan
from kvmanager import PoolSpec
from services.engine.block_client import BlockClient
from services.engine.startup.backends import gpu_decoder

BLOCK_SIZE = 16
WAIT_SECONDS = 60
READ_BYTES = 4 << 30
PRODUCT_SIZE = 8192


@dataclass(frozen=True)
class LlamaSizes:
    """The model and its load: batches of requests at a context length, and some long prompts."""

    config: dict[str, Any]
    batches: tuple[int, ...]
    context: int
    steps: int
    prompt: int
    prompts: int
    token_budget: int


# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
TINY = LLAMA_3_8B | {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FULL = LlamaSizes(LLAMA_3_8B, (1, 32, 256), 1024, 64, 8000, 3, 8192)
SMALL = LlamaSizes(TINY, (1, 2), 12, 2, 20, 1, 64)


class _Clock(NamedTuple):
    """A replacement of `torch.cuda.Event` on the CPU."""

    at: float

    def elapsed_time(self, later: "_Clock") -> float:
        return 1000 * (later.at - self.at)


@dataclass
class _Watched:
    """Records on the device when each step began and ended."""

    runner: ModelRunner
    device: torch.device
    blocks: int
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> Launched:
        start = self._moment()
        launched = self.runner.launch(plan)
        self.events.append((start, self._moment()))
        return launched

    def _moment(self) -> Any:
        if self.device.type != "cuda":
            return _Clock(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # pragma: no cover - CUDA
        event.record()  # pragma: no cover - CUDA
        return event  # pragma: no cover - CUDA

    def idle_share(self, steps: int) -> float:
        """Return the share of idle time of the device between the first and last of the latest steps."""
        latest = self.events[-steps:]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # pragma: no cover - CUDA
        idle = sum(end.elapsed_time(start) for (_, end), (start, _) in pairwise(latest))
        return float(max(0.0, idle) / latest[0][0].elapsed_time(latest[-1][1]))


def measure(sizes: LlamaSizes, device: torch.device, notes: Notes) -> None:
    """Decode at each batch size, then begin with a long prompt."""
    loaded = _model(sizes.config, device)
    ceilings = _ceilings(device, small=sizes is SMALL)
    notes.raw("ceilings", ceilings)
    runner = _runner(loaded, sizes, device)
    for batch in sizes.batches:
        with notes.kept(f"llama, {batch} sequences"):
            seconds, idle = _decode(runner, loaded, sizes, batch)
            notes.raw(f"b{batch}_step_seconds", seconds)
            notes.raw(f"b{batch}_idle_share", idle)
            _note_decoding(notes, batch, median(seconds), _roofline(loaded, batch, sizes.context, ceilings))
            if batch == min(sizes.batches):  # the shortest steps leave the host the least time to prepare
                notes.row("idle_share_between_steps", round(idle, 4), "share")
    with notes.kept("llama, a long prompt"):
        spent = [_prefill(runner, loaded, sizes, seed) for seed in range(sizes.prompts)]
        notes.raw("prompt_seconds", spent)
        notes.row("llama_3_8b_prefill", round(sizes.prompt / median(spent)), "tokens/s")


def _note_decoding(notes: Notes, batch: int, step: float, roofline: float) -> None:
    name = f"llama_3_8b_b{batch}"
    notes.row(f"{name}_milliseconds_per_step", round(1000 * step, 3), "ms")
    notes.row(f"{name}_tokens_per_second", round(batch / step, 1), "1/s")
    notes.row(f"{name}_of_the_roofline", round(roofline / step, 3), "ratio", "memory and products")


def _roofline(loaded: LoadedModel, batch: int, context: int, ceilings: dict[str, float]) -> float:
    """Return the lower bound of a step's seconds: read all matrices once or multiply them, then read all K and V."""
    embedding = loaded.model.get_input_embeddings().weight
    matrices = sum(one.numel() for one in loaded.model.parameters() if one.dim() == 2) - embedding.numel()
    products = max(2 * matrices / ceilings["read"], 2 * batch * matrices / ceilings["products"])
    cached = batch * context * loaded.geometry.block_bytes(1, loaded.dtype) / ceilings["read"]
    return float(products + cached)


def _ceilings(device: torch.device, *, small: bool) -> dict[str, float]:
    """Return read bandwidth in bytes per second, and operations per second of large bfloat16 products."""
    size, count = (64, 1 << 16) if small else (PRODUCT_SIZE, READ_BYTES)
    memory = torch.ones(count, dtype=torch.uint8, device=device)
    runs = {"read": reading(memory), "products": multiplying(size, device)}
    seconds = take_turns(runs, 10, device, "ceilings")
    return {"read": count / median(seconds["read"]), "products": 2 * size**3 / median(seconds["products"])}


def _model(config: dict[str, Any], device: torch.device) -> LoadedModel:
    """Create the model on its device, because 8 billion random numbers take minutes on the host."""
    register()
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**config), attn_implementation=ATTENTION_NAME)
    finally:
        torch.set_default_dtype(before)
    return take(model.eval(), "random")


def _runner(loaded: LoadedModel, sizes: LlamaSizes, device: torch.device) -> _Watched:
    blocks = max(sizes.batches) * (blocks_for(sizes.context + 2 * sizes.steps, BLOCK_SIZE) + 2)
    blocks = max(blocks, 2 * blocks_for(sizes.prompt, BLOCK_SIZE))
    backend = TritonBackend(loaded.geometry, BLOCK_SIZE, blocks, loaded.dtype, device)
    decoder = gpu_decoder(loaded, backend, ModulesDecoder(loaded, backend))
    width = blocks_for(loaded.context_tokens, BLOCK_SIZE)
    recorded = RecordedDecoder(decoder, recorder(device), BLOCK_SIZE, width, sizes.batches, device)
    recorded.prepare(lambda done, of: print(f"recorded {done} of {of} batch sizes", flush=True))
    return _Watched(ModelRunner(loaded, backend, BLOCK_SIZE, decoder=recorded), device, blocks)


def _decode(watched: _Watched, loaded: LoadedModel, sizes: LlamaSizes, batch: int) -> tuple[list[float], float]:
    """Decode a batch at a context; return the seconds of each step in which all decode, and the device's idle share."""
    length = sizes.context - sizes.steps // 2  # so that the steps are centred on the context
    with _engine(watched, loaded, sizes) as (engine, wait):
        draw = random.Random(batch)
        for number in range(batch):
            prompt = tuple(draw.randrange(loaded.vocabulary_size) for _ in range(length))
            stopping = Stopping(sizes.steps + batch + 2)
            engine.scheduler.requests.submit(Request(f"r{number}", prompt, Sampling(temperature=0.0), stopping))
        seconds: list[float] = []
        totals, last = engine.scheduler.totals, time.perf_counter()
        while len(seconds) <= sizes.steps:
            before, turn = totals.generated_tokens, engine.turn()
            assert engine.last_failure is None, engine.last_failure
            now = time.perf_counter()
            if turn.step is None:
                wait(turn.progressed)
            elif totals.generated_tokens - before == batch:
                seconds.append(now - last)
            last = now
        idle = watched.idle_share(sizes.steps)
        for number in range(batch):
            engine.scheduler.requests.cancel(f"r{number}")
        _finish(engine, wait)
    return seconds[1:], idle  # the first may include the end of a prompt


def _prefill(watched: _Watched, loaded: LoadedModel, sizes: LlamaSizes, seed: int) -> float:
    """Return the seconds from a long prompt's submission to its first token."""
    draw = random.Random(seed)
    prompt = tuple(draw.randrange(loaded.vocabulary_size) for _ in range(sizes.prompt))
    with _engine(watched, loaded, sizes) as (engine, wait):
        begun = time.perf_counter()
        engine.scheduler.requests.submit(Request("r", prompt, Sampling(temperature=0.0), Stopping(1)))
        _finish(engine, wait)
        return time.perf_counter() - begun


def _finish(engine: Engine, wait: Any) -> None:
    while not engine.scheduler.empty:
        turn = engine.turn()
        assert engine.last_failure is None, engine.last_failure
        if turn.step is None:
            wait(turn.progressed)


@contextmanager
def _engine(watched: _Watched, loaded: LoadedModel, sizes: LlamaSizes) -> Iterator[tuple[Engine, Any]]:
    """Connect an engine with an empty pool to a KV manager in another process.

    Yields the engine, and a function that waits for the manager after a turn without progress.
    """
    blocks = watched.blocks
    capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, BLOCK_SIZE, blocks)
    largest = max(sizes.batches)
    scheduler = Scheduler(capacity, Limits(max(sizes.token_budget, largest), largest), ahead=True)
    spec = PoolSpec("gpu-check", 1, loaded.fingerprint, BLOCK_SIZE, blocks)
    news = threading.Event()
    with _manager() as address, _event_loop() as loop:
        link, task = asyncio.run_coroutine_threadsafe(_attach(address, spec, news.set), loop).result(WAIT_SECONDS)

        def wait(progressed: bool) -> None:
            if not progressed:
                assert news.wait(WAIT_SECONDS), "the KV manager does not answer"
                news.clear()

        while not link.ready:
            wait(progressed=False)
            link.receive()
        yield Engine(scheduler, watched, link, time.monotonic), wait
        loop.call_soon_threadsafe(task.cancel)


async def _attach(address: str, spec: PoolSpec, wake: Any) -> tuple[BlockClient, "asyncio.Task[None]"]:
    link = BlockClient(address, spec, wake)
    return link, asyncio.create_task(link.run())


@contextmanager
def _manager() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "kvmanager.sock"
        command = [sys.executable, "-m", "bench.gpu_check.manager_process", str(socket)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n", "the KV manager did not start"
        try:
            yield f"unix:{socket}"
        finally:
            process.communicate()


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_SECONDS)
