"""Routers of other stacks as processes in front of servers that speak OpenAI's API, and what they call there."""

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from bench.loads.http_server import free_address
from tests.acceptance.event_consumers import until
from tests.acceptance.router_environments import router_environment
from tests.running_quire import Output, Running

# A dead worker is noticed within seconds.
_OFTEN = (
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
    *("--worker-startup-check-interval", "1"),
)
_MODULES = {"vllm-router": "vllm_router.launch_router", "sglang-router": "sglang_router.launch_router"}


class RunningRouter(Running):
    """`vllm-router` or `sglang-router` in front of the URLs of workers."""

    def __init__(self, name: str, workers: Sequence[str], *options: str) -> None:
        address, metrics = free_address(), free_address()
        self.url = f"http://{address}"
        command = [str(router_environment(name).python()), "-m", _MODULES[name], *_address_of(address), *_OFTEN]
        command += ["--prometheus-port", metrics.rpartition(":")[2], "--worker-urls", *workers, *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "NO_PROXY": "*"}
        )
        self.output = Output(self.process)
        until(lambda: self.healthy() == len(workers), f"{name} and its workers are ready")

    def healthy(self) -> int:
        """Return how many workers the router takes for healthy; 0 while it starts."""
        try:
            workers = httpx.get(f"{self.url}/workers").json()["workers"]
        except httpx.TransportError:
            assert self.process.poll() is None, "\n".join(self.output.lines)
            return 0
        return sum(one["is_healthy"] for one in workers)

    def close(self) -> None:
        """Stop it, and kill it if it waits for its clients."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.ended()


def _address_of(address: str) -> list[str]:
    host, _, port = address.partition(":")
    return ["--host", host, "--port", port]


@contextmanager
def running_router(name: str, workers: Sequence[str], *options: str) -> Iterator[RunningRouter]:
    """Start a router, and stop it at the end."""
    router = RunningRouter(name, workers, *options)
    try:
        yield router
    finally:
        router.close()


class WorkerCalls(ThreadingHTTPServer):
    """A server between a router and a worker that counts calls by method, path and status."""

    def __init__(self, worker: str) -> None:
        handlers = {"do_GET": _forward, "do_POST": _forward, "log_message": lambda *_: None}
        super().__init__(("127.0.0.1", 0), type("Forwarder", (BaseHTTPRequestHandler,), handlers))
        self.worker = worker
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.counts: Counter[tuple[str, str, int]] = Counter()
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


def _forward(call: BaseHTTPRequestHandler) -> None:
    calls = call.server
    assert isinstance(calls, WorkerCalls)
    body = call.rfile.read(int(call.headers.get("content-length") or 0))
    headers = {"content-type": call.headers.get("content-type", "application/json")}
    answer = httpx.request(call.command, calls.worker + call.path, content=body, headers=headers, timeout=60)
    calls.counts[call.command, call.path.partition("?")[0], answer.status_code] += 1
    call.send_response(answer.status_code)
    call.send_header("content-type", answer.headers["content-type"])
    call.send_header("content-length", str(len(answer.content)))
    call.end_headers()
    call.wfile.write(answer.content)
