"""A Quire for provoking alerts: services can be killed, stopped and restarted, and links of the engine can be cut.

The state of its KV manager can be damaged (`python -m tests.running.damaged_kvmanager`).
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx

from quire.v1 import gateway_pb2, kvmanager_pb2_grpc
from tests.api_keys import Keyed, write_keys
from tests.load import prompt_request
from tests.running.forwarder import Forwarder
from tests.running_quire import CALL_SECONDS, RunningService

# A stopped service's port stays free at this address, because local clients connect from 127.0.0.1.
METRICS_HOST = "127.0.0.2"
POOL_BLOCKS, SEQUENCES, MAX_REQUESTS = 40, 24, 24
LEASE_SECONDS = 2
# The second tenant is limited to one request at a time.
KEYS = {"a" * 32: 'tenant = "acme"', "b" * 32: 'tenant = "zeta"\nmax_concurrent_requests = 1'}


class AlertStack:
    def __init__(self, folder: Path, model: str, kept_blocks: Path | None = None) -> None:
        keys = write_keys(folder / "keys.toml", KEYS)
        self.ports = {name: _free_port() for name in ("kvmanager", "engine", "gateway")}
        self.kv_events, self.kv_event_replays = (f"{METRICS_HOST}:{_free_port()}" for _ in range(2))
        self.to_manager = Forwarder(folder / "kvmanager.sock")
        self.to_engine = Forwarder(folder / "engine.sock")
        self._commands = {
            "kvmanager": ("--listen", f"unix:{folder}/kvmanager.sock", "--lease-seconds", str(LEASE_SECONDS)),
            "engine": (
                *("--listen", f"unix:{folder}/engine.sock", "--engine-id", "one", "--model", model),
                *("--kvmanager", self.to_manager.address, "--heartbeat-seconds", "0.2", "--threads", "1"),
                *("--device-blocks", str(POOL_BLOCKS), "--max-sequences", str(SEQUENCES), "--preemption", "recompute"),
                *("--keep-blocks", str(kept_blocks or "off"), "--verify-blocks", "1", "--smg"),
                *("--kv-events-listen", self.kv_events, "--kv-events-replay-listen", self.kv_event_replays),
                *("--kv-events-queue", "1", "--kv-events-history", "64"),
            ),
            "gateway": (
                *("--listen", f"unix:{folder}/gateway.sock", "--engines", self.to_engine.address),
                *("--api-keys", str(keys), "--http-listen", "127.0.0.1:0", "--failover-seconds", "1"),
                *("--max-requests", str(MAX_REQUESTS), "--failovers", "1000", "--slow-client-seconds", "1"),
                *("--max-buffered-tokens", "256"),
            ),
        }
        with ExitStack() as failed:
            self._services = dict[str, RunningService]()
            failed.callback(self._close_services)
            for name in self._commands:
                self._services[name] = self._start_service(name)
            self._services["gateway"].output.wait_for("gateway is ready")
            self.acme, self.zeta = self._clients()
            failed.pop_all()

    @property
    def targets(self) -> dict[str, str]:
        """Metrics addresses by the names in the project's Prometheus configuration."""
        return {name: f"{METRICS_HOST}:{port}" for name, port in self.ports.items()}

    @property
    def kvmanager(self) -> kvmanager_pb2_grpc.KVManagerStub:
        return kvmanager_pb2_grpc.KVManagerStub(self._services["kvmanager"].channel)

    @property
    def engine_address(self) -> str:
        return self._services["engine"].address

    @property
    def address(self) -> str:
        return self._services["gateway"].address

    def kill(self, name: str) -> None:
        self._services[name].kill()
        self._services[name].close()

    def start(self, name: str) -> None:
        """Start a killed service at its old addresses, and wait until the gateway is ready."""
        after = len(self._services["gateway"].output.lines)
        self._services[name] = self._start_service(name)
        if name == "gateway":
            self._services[name].output.wait_for("gateway is ready")
            self.acme, self.zeta = self._clients()
        elif name == "engine":
            self._services["gateway"].output.wait_for("gateway is ready", after=after)

    def exited(self) -> dict[str, list[str]]:
        """Last lines of output of the services that have exited."""
        return {
            name: service.output.lines[-20:]
            for name, service in self._services.items()
            if service.process.poll() is not None
        }

    def damage(self) -> None:
        """Corrupt the KV manager's pool state."""
        self._signal("kvmanager", signal.SIGUSR1)

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        self._signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(name, signal.SIGCONT)

    @contextmanager
    def slowed(self, name: str, stopped_seconds: float, run_seconds: float) -> Iterator[None]:
        """Stop and continue a process repeatedly."""

        def stop_and_continue(ended: threading.Event) -> None:
            with self.stopped(name):
                ended.wait(stopped_seconds)
            ended.wait(run_seconds)

        with repeated(stop_and_continue):
            yield

    def post(self) -> None:
        """Request a completion over HTTP, and ignore the response."""
        url = self._services["gateway"].output.wait_for("gateway listens for HTTP at ").split(" at ")[1]
        headers = {"authorization": f"Bearer {next(iter(KEYS))}"}
        body = {"prompt": "Once", "max_tokens": 2}
        with suppress(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=5)

    def close(self) -> None:
        for client in (self.acme, self.zeta):
            client.close()
        self._close_services()

    def _close_services(self) -> None:
        for service in reversed(self._services.values()):
            service.close()
        for forwarder in (self.to_engine, self.to_manager):
            forwarder.close()

    def _clients(self) -> tuple[Keyed, Keyed]:
        acme, zeta = (Keyed(self.address, key) for key in KEYS)
        return acme, zeta

    def _start_service(self, name: str) -> RunningService:
        arguments = (*self._commands[name], "--metrics-listen", f"{METRICS_HOST}:{self.ports[name]}")
        if name == "kvmanager":
            return RunningService(name, name, *arguments, module="tests.running.damaged_kvmanager")
        return RunningService(name, *arguments)

    def _signal(self, name: str, number: int) -> None:
        os.kill(self._services[name].process.pid, number)


@contextmanager
def repeated(act: Callable[[threading.Event], None], times: int = 1) -> Iterator[None]:
    """Call `act` repeatedly on `times` threads; its event is set at the end of the block."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            act(ended)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(times)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(timeout=CALL_SECONDS)


@contextmanager
def clients(
    stack: AlertStack, count: int, tokens: int, *, timeout: float = CALL_SECONDS, pause: float = 0.02
) -> Iterator[None]:
    """Run `count` clients that request `tokens` tokens repeatedly, with `pause` seconds between requests."""

    def request(ended: threading.Event) -> None:
        call = stack.acme.gateway.Generate(prompt_request(f"{time.monotonic_ns()} says", tokens), timeout=timeout)
        read(call, ended)
        ended.wait(pause)

    with repeated(request, count):
        yield


def read(call: Any, ended: threading.Event) -> None:
    """Read a stream until its end, an error or the event."""
    with suppress(grpc.RpcError):
        for _ in call:
            if ended.is_set():
                break
    call.cancel()


def small_window(address: str) -> grpc.Channel:
    """Return a separate connection, on which a stream that is not read soon holds up its writer."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
    options.append(("grpc.use_local_subchannel_pool", 1))
    return grpc.insecure_channel(address, options=options)


@contextmanager
def unread(stack: AlertStack) -> Iterator[None]:
    """Start a stream that is never read."""
    request: gateway_pb2.GenerateRequest = prompt_request("unread", 600)
    request.output.logprobs = 20
    with small_window(stack.address) as channel:
        method = channel.unary_stream(
            "/quire.v1.Gateway/Generate",
            request_serializer=gateway_pb2.GenerateRequest.SerializeToString,
            response_deserializer=gateway_pb2.GenerateResponse.FromString,
        )
        call = method(request, metadata=stack.acme.metadata, timeout=CALL_SECONDS)
        yield
        call.cancel()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((METRICS_HOST, 0))
        return int(one.getsockname()[1])
