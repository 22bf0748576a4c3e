"""An engine whose model computes nothing, for `bench host`: the CPU time that its process takes for a token.

`python host_worker.py process` drives the engine's own turns, with the KV manager's core in the process; the core's
time is subtracted. `python host_worker.py grpc` serves a gateway's stream, with a KV manager as another process.
`python host_worker.py gateway ADDRESS` is that gateway. Each prints its name (an engine's as JSON), then a
line for each line of work.

It runs the code on the path, so that an earlier commit runs the same worker.
"""

import os

# As in the engine's process, and before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from blocks import Step, blocks_for
from engine.run.loop import Engine
from engine.run.runner import ModelRunner
from engine.schedule.limits import Limits
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Launched, StepPlan
from quire.v1 import engine_pb2, engine_pb2_grpc
from services.engine.driver import EngineDriver
from services.engine.gateway_link import GatewayLink
from services.engine.gateway_requests import Arrival
from services.engine.metrics import EngineMetrics
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports
from services.engine.server import EngineService
from services.engine.settings import EngineSettings
from services.runtime import transport
from services.runtime.tracing.export import create_tracing
from tests.in_process import InProcessBlocks

try:
    _CAPACITY: Any = import_module("engine.schedule.capacity")
except ImportError:  # in earlier commits
    _CAPACITY = import_module("engine.schedule.request")

BLOCK_SIZE = 16
VOCABULARY = 1024
TOKEN_ID = 7
WARM_UP_STEPS = 20  # after the last prompt
MARGIN = 100  # tokens that the first sequences gain while the prompts of others are computed
STEP_SECONDS = 0.01  # of a step that is served: with none, the streams would fall behind and merge steps
SETTINGS = {"max_sequences": 256, "token_budget": 8192, "block_size": BLOCK_SIZE}

Work = dict[str, int]  # sequences, context, steps


@dataclass(frozen=True)
class NoModel:
    """The description of the missing model."""

    device = torch.device("cpu")
    fingerprint = "nothing"
    vocabulary_size = VOCABULARY
    eos_token_ids: frozenset[int] = frozenset()
    dtype = "none"
    weight_format = "none"
    cache_dtype = "none"


class EmptyDecoder:
    """Returns the same logits for each row, of one tensor."""

    integers = torch.zeros(0, dtype=torch.int32).numpy().dtype.type

    def __init__(self, rows: int) -> None:
        logits = torch.zeros(rows, VOCABULARY)
        logits[:, TOKEN_ID] = 1.0
        self._logits = [logits[:count] for count in range(rows + 1)]  # by the number of places: no work of a step

    def logits(self, _tokens: Any, _positions: Any, places: Any, _batch: Any) -> torch.Tensor:
        """Return a row for each place."""
        return self._logits[len(places)]


class MeasuredRunner:
    """The engine's runner without a model; takes the CPU time of the process between two of its launches."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        decoder: Any = EmptyDecoder(SETTINGS["max_sequences"])
        loaded: Any = NoModel()
        backend: Any = None  # only copies of blocks use it, and there are none
        self._runner = ModelRunner(loaded, backend, BLOCK_SIZE, decoder=decoder)
        self._step_seconds = step_seconds
        self._work: Work = {}
        self._full_steps = 0
        self._begun = 0.0
        self._pacing = 0.0  # CPU seconds
        self.used: float | None = None

    def begin(self, work: Work) -> None:
        """Measure the next steps in which all sequences decode."""
        self._work, self._full_steps, self.used = work, 0, None

    def launch(self, plan: StepPlan) -> Launched:
        """Launch the step, and note the time at the first and the last measured one."""
        wanted = self._work.get("sequences")
        if len(plan.work) == wanted and all(len(work.token_ids) == 1 for work in plan.work):
            self._full_steps += 1
            if self._full_steps == WARM_UP_STEPS:
                gc.collect()
                self._begun = self.now()
            elif self._full_steps == WARM_UP_STEPS + self._work["steps"]:
                self.used = self.now() - self._begun
        if self._step_seconds:
            begun = time.thread_time()
            time.sleep(self._step_seconds)
            self._pacing += time.thread_time() - begun
        return self._runner.launch(plan)

    def now(self) -> float:
        """Return the CPU seconds of this process, without the time spent waiting to keep the pace."""
        return time.process_time() - self._pacing


class TimedBlocks(InProcessBlocks):
    """The core of the KV manager, and the CPU seconds that it took."""

    seconds = 0.0

    def send(self, step: Step) -> None:
        """Apply a block step."""
        begun = time.process_time()
        super().send(step)
        self.seconds += time.process_time() - begun


def scheduler() -> Scheduler:
    """Return an empty scheduler that plans ahead, as on a GPU, with room for the largest work."""
    sequences = SETTINGS["max_sequences"]
    capacity = _CAPACITY.Capacity(1 << 16, VOCABULARY, BLOCK_SIZE, sequences * blocks_for(4096, BLOCK_SIZE))
    return Scheduler(capacity, Limits(max_sequences=sequences, token_budget=SETTINGS["token_budget"]), ahead=True)


def submissions(work: Work) -> list[engine_pb2.Submission]:
    """Return greedy requests with prompts of random tokens that outlast the measured steps."""
    made = []
    for number in range(work["sequences"]):
        one = engine_pb2.Submission(request_id=f"request-{number:024d}", attempt=1, salt=f"{number}".encode())
        one.prompt_token_ids.extend((number + place) % VOCABULARY for place in range(work["context"]))
        one.sampling.temperature = 0
        one.stopping.max_tokens = work["steps"] + WARM_UP_STEPS + MARGIN
        one.stopping.ignore_eos = True
        made.append(one)
    return made


async def in_process(work: Work) -> float:
    """Return the CPU seconds of the steps, without the KV manager's core."""
    planned, runner = scheduler(), MeasuredRunner()
    blocks = TimedBlocks(planned.capacity)
    runner.now = lambda: time.process_time() - blocks.seconds  # type: ignore[method-assign]
    runner.begin(work)
    metrics, tracing = EngineMetrics(), create_tracing("engine", "")
    reports = RequestReports("nothing", "engine", tracing)
    engine = Engine(planned, runner, blocks, time.monotonic)
    driver = EngineDriver(engine, frozenset(), 10.0, metrics, RequestsRecorder(""), reports)
    metrics.on_start("nothing", "engine", lambda: driver.stats)
    link = GatewayLink()
    for one in submissions(work):
        driver.submit(link, Arrival(one, time.monotonic()))
    sending = asyncio.create_task(_send(link))
    turn = getattr(driver, "turn" if hasattr(driver, "turn") else "_turn")  # its name in earlier commits
    while runner.used is None:
        turn()
        await asyncio.sleep(0)  # the output enters the link,
        await asyncio.sleep(0)  # and is sent
    sending.cancel()
    return runner.used


async def _send(link: GatewayLink) -> None:
    """Write the messages of a link, as the engine's servicer does."""
    while True:
        engine_pb2.ServeResponse(step=await link.get()).SerializeToString()


@dataclass(frozen=True)
class EmptyParts:
    """A services.engine.startup.parts.Parts."""

    loaded: NoModel
    scheduler: Scheduler
    runner: MeasuredRunner
    device: str = "none"
    recording_faults: Mapping[str, str] = field(default_factory=dict)
    ranks: None = None
    kept: None = None
    proof: None = None


async def serve(model: str) -> None:
    """Serve the engine, with a KV manager and a gateway as other processes, for each line of work."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        at = {name: f"unix:{folder}/{name}.sock" for name in ("engine", "kvmanager")}
        quire = [sys.executable, "-m", "services.cli.main"]
        options = ["--map-listen", "", "--metrics-listen", "127.0.0.1:0", "--listen", at["kvmanager"]]
        stack.callback(_end, subprocess.Popen([*quire, "kvmanager", *options], stderr=subprocess.DEVNULL))
        runner = MeasuredRunner(STEP_SECONDS)
        settings = EngineSettings(listen=at["engine"], kvmanager=at["kvmanager"], model=model)
        parts: Any = EmptyParts(NoModel(), scheduler(), runner)
        service = EngineService(settings, EngineMetrics(), lambda _: parts)
        await service.start()
        running = asyncio.create_task(service.run())
        await service.readiness.wait()
        command = [sys.executable, __file__, "gateway", at["engine"]]
        gateway = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(_end, gateway)
        assert gateway.stdin is not None
        assert gateway.stdout is not None
        await asyncio.to_thread(gateway.stdout.readline)  # its name
        print(json.dumps({"name": "engine"}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            runner.begin(json.loads(line))
            gateway.stdin.write(line)
            gateway.stdin.flush()
            ended = await asyncio.to_thread(gateway.stdout.readline)
            assert ended, "the gateway has ended before its requests"
            print(json.dumps({"cpu_seconds": runner.used}), flush=True)
        running.cancel()
        await service.stop()


def _end(process: "subprocess.Popen[Any]") -> None:
    process.terminate()
    process.wait()


async def run_gateway(address: str) -> None:
    """For each line of work, submit its requests on one stream and read their outputs until all have ended."""
    async with transport.channel(address, transport.LINK_MESSAGE_BYTES) as channel:
        stream = engine_pb2_grpc.EngineStub(channel).Serve()
        await stream.read()  # the engine's first message: the link is up
        print("gateway", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            live = 0
            for one in submissions(json.loads(line)):
                await stream.write(engine_pb2.ServeRequest(submission=one))
                live += 1
            while live:
                response = await stream.read()
                assert isinstance(response, engine_pb2.ServeResponse), "the engine has ended the stream"
                live -= len(response.step.finished)
            print("ended", flush=True)


def main(way: str, *arguments: str) -> None:
    """Answer each line of work."""
    if way == "grpc":
        asyncio.run(serve(*arguments))
    elif way == "gateway":
        asyncio.run(run_gateway(*arguments))
    else:
        print(json.dumps({"name": "engine"}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"cpu_seconds": asyncio.run(in_process(json.loads(line)))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
