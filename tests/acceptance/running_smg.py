"""The router smg as a process in front of engines, and what it knows of their caches."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence

import grpc
import httpx
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from bench.loads.http_server import free_address
from tests.acceptance.router_environments import router_environment
from tests.running_quire import Output, Running
from tests.scrape import Scrape

READY_SECONDS = 60.0
# A dead worker is noticed within seconds. Nothing but the engines is asked for the tokenizer.
_OPTIONS = (
    *("--policy", "cache_aware", "--load-monitor-interval", "1"),
    *("--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"),
    *("--shutdown-grace-period-secs", "1"),
)
_NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"}


class RunningSmg(Running):
    """`smg launch` in front of the addresses of engines that serve it."""

    def __init__(self, engines: Sequence[str], *options: str) -> None:
        """Start it, and wait until it has the engines and their tokenizer."""
        address, metrics = free_address(), free_address()
        self.url, self.metrics_url = f"http://{address}", f"http://{metrics}/metrics"
        command = [str(router_environment("smg").command("smg")), "launch", *_listening(address, metrics)]
        command += ["--worker-urls", *(f"grpc://{one}" for one in engines), *_OPTIONS, *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **_NOWHERE}
        )
        self.output = Output(self.process)
        self.until_healthy(len(engines))
        self.output.wait_for("Successfully loaded tokenizer")

    def until_healthy(self, count: int) -> None:
        """Wait until smg takes this many engines for healthy."""
        deadline = time.monotonic() + READY_SECONDS
        while (found := self._healthy()) != count:
            assert time.monotonic() < deadline, f"{found} engines are healthy, not {count}"
            time.sleep(0.1)

    def indexed_blocks(self) -> dict[str, float]:
        """Return how many blocks smg knows of each engine, by its address."""
        values = Scrape.of(self.metrics_url).values("smg_kv_index_blocks", "worker")
        return {worker.removeprefix("grpc://"): count for worker, count in values.items()}

    def close(self) -> None:
        """Stop it, and kill it if it waits for its clients."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.ended()

    def _healthy(self) -> int:
        try:
            workers = httpx.get(f"{self.url}/workers", timeout=10).json()["workers"]
        except httpx.TransportError:
            assert self.process.poll() is None, "\n".join(self.output.lines)
            return 0
        return sum(one["is_healthy"] for one in workers)


def announced_blocks(engine: str) -> int:
    """Return how many blocks an engine's snapshot has."""
    with grpc.insecure_channel(engine) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        first = next(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=READY_SECONDS))
        return int(first.snapshot.blocks)


def _listening(address: str, metrics: str) -> list[str]:
    host, _, port = address.partition(":")
    metrics_host, _, metrics_port = metrics.partition(":")
    return [
        *("--host", host, "--port", port),
        *("--prometheus-host", metrics_host, "--prometheus-port", metrics_port),
    ]
