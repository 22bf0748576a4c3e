"""A gateway, a paced engine, a KV manager and clients as processes, for benchmarks of the gateway."""

import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.loads.load_client import RequestOutcome
from bench.loads.paced_engine import PacedEngine
from bench.loads.peer import Worker
from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.running_quire import RunningService
from tests.tiny_models import make_tiny_model

NANO = 1e-9
PROMPT_TOKENS = 8
VOCABULARY = 384
_READY_SECONDS = 60

Item = dict[str, Any]


@dataclass
class PacedQuire:
    """The running services. `sent_file` exists once the engine has exited."""

    gateway: RunningService
    engine: PacedEngine
    sent_file: Path
    folder: Path

    def cpu_seconds(self) -> float:
        """CPU seconds of the gateway until now."""
        times = psutil.Process(self.gateway.process.pid).cpu_times()
        return float(times.user + times.system)

    def memory_bytes(self) -> int:
        """Resident memory of the gateway in bytes."""
        return int(psutil.Process(self.gateway.process.pid).memory_info().rss)


@contextmanager
def paced_quire(step_seconds: float, sequences: int, blocks: int, *gateway: str) -> Iterator[PacedQuire]:
    """Start the services with a tiny model, and stop them at the end."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = make_tiny_model("llama", folder / "tiny-llama")
        manager = RunningService("kvmanager", "--listen", f"unix:{folder}/kvmanager.sock")
        stack.callback(manager.close)
        engine = PacedEngine(
            step_seconds,
            folder / "sent",
            *("--listen", f"unix:{folder}/engine.sock", "--kvmanager", manager.address, "--model", str(model)),
            *("--max-sequences", str(sequences), "--token-budget", str(max(2048, 2 * sequences))),
            *("--device-blocks", str(blocks), "--threads", "1"),
        )
        stack.callback(engine.close)
        front = RunningService(
            "gateway", "--listen", f"unix:{folder}/gateway.sock", "--engines", engine.address, *gateway
        )
        stack.callback(front.close)
        front.output.wait_for("gateway is ready", _READY_SECONDS)
        gateway_pb2_grpc.GatewayStub(front.channel).GetModel(gateway_pb2.GetModelRequest(), timeout=_READY_SECONDS)
        yield PacedQuire(front, engine, folder / "sent", folder)


class Clients:
    """Client processes that share the requests of a run."""

    def __init__(self, quire: PacedQuire, count: int) -> None:
        command = [sys.executable, "-m", "bench.loads.load_client", quire.gateway.address]
        self._folder = quire.folder
        self._workers = [Worker(f"client {number}", command) for number in range(count)]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def run(self, requests: list[Item], until: float, closed: int = 0) -> tuple[list[RequestOutcome], float]:
        """Run requests, in an open or a closed loop; return their outcomes, and CPU seconds."""
        count = len(self._workers)
        files = [self._folder / f"outcomes-{number}" for number in range(count)]
        lines = [
            json.dumps(
                {"requests": requests[n::count], "until": until, "closed": closed // count, "file": str(files[n])}
            )
            for n in range(count)
        ]
        with ThreadPoolExecutor(count) as threads:
            used = list(threads.map(lambda pair: pair[0].measure(pair[1]), zip(self._workers, lines, strict=True)))
        outcomes = [_outcome(line) for file in files for line in file.read_text().splitlines()]
        return sorted(outcomes, key=lambda outcome: outcome.sent), sum(one["cpu_seconds"] for one in used)


def _outcome(line: str) -> RequestOutcome:
    values = json.loads(line)
    return RequestOutcome(**{**values, "deltas": [tuple(one) for one in values["deltas"]]})


def prompt_of(number: int) -> list[int]:
    """Return a different short prompt for each request."""
    return [2 + (number // 128**place) % 128 for place in range(PROMPT_TOKENS)]
