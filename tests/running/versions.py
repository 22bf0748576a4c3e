"""Services of the last release and of this tree together, and a load on them that counts every lost stream."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc

from quire.v1 import gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from services.runtime import transport
from tests.faults import wait_until
from tests.running_quire import (
    CALL_SECONDS,
    COMMAND,
    SLOW_ENGINE,
    Answer,
    Output,
    RunningService,
    launch,
    metrics_url,
    open_channel,
)

ROOT = Path(__file__).parents[2]
CLIENTS = 6
# A client that sends a request again if a gateway refuses it, as one that drains does, and uses ready gateways only.
_RETRIES = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": "quire.v1.Gateway"},
    "methodConfig": [
        {
            "name": [{"service": "quire.v1.Gateway"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
_OPTIONS = [("grpc.service_config", json.dumps(_RETRIES)), ("grpc.max_reconnect_backoff_ms", 500)]
# Ports of other tests' services are at other addresses.
_GATEWAYS = "127.0.0.4:0"
# Refused connections to services that are being replaced are none.
_FAULTS = re.compile(r"Traceback|\w+(Error|Exception)\b|\bERROR\b|unknown|unexpected|malformed|invalid")


def last_release() -> tuple[str, str]:
    """Version and commit of the last release, from CHANGELOG.md."""
    released = re.search(r"^## (\S+)\n\nCommit: ([0-9a-f]{40})$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released, "CHANGELOG.md has a release"
    return released[1], released[2]


def extract(commit: str, folder: Path) -> Path | None:
    """Write the tree of a commit into a folder; None if this clone lacks the commit."""
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
    )
    if known.returncode:
        return None
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


@dataclass(frozen=True)
class Version:
    """A tree from which services run."""

    name: str
    tree: Path

    @property
    def environment(self) -> dict[str, str]:
        """Imports are from this tree alone, whatever is installed and wherever the process starts."""
        return {"PYTHONPATH": os.pathsep.join((str(self.tree), str(self.tree / "protos"))), "PYTHONSAFEPATH": "1"}

    def imported_files(self) -> set[Path]:
        """The files that its services import, as a new process finds them."""
        modules = ("services.cli.main", "quire.v1.engine_pb2", "engine", "kvmanager", "blocks")
        code = f"import importlib; [print(importlib.import_module(name).__file__) for name in {modules}]"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return {Path(file) for file in done.stdout.split()}


class VersionedService(RunningService):
    """A service of one version."""

    def __init__(self, version: Version, label: str, *arguments: str) -> None:
        self.version, self.label = version, label
        module = SLOW_ENGINE if label == "engine" else COMMAND
        self.process = launch(label, *arguments, module=module, **version.environment)
        self.output = Output(self.process)
        try:
            self.address = self.output.wait_for("listens on").split("listens on ")[1]
            self.metrics_url = metrics_url(self.output, label)
        except RuntimeError:
            self.process.kill()
            self.process.wait()
            raise
        self.channel = open_channel(self.address)

    def faults(self) -> list[str]:
        """Lines of its output that report a fault, after its version and kind."""
        return [f"{self.version.name} {self.label}: {line}" for line in self.output.lines if _FAULTS.search(line)]


class Fleet:
    """A KV manager, engines `one` and `two`, and two gateways. Each service is replaced by one of another version."""

    def __init__(self, folder: Path, model: str, version: Version) -> None:
        self._folder, self._model = folder, model
        self.all: list[VersionedService] = []
        self.manager = self._start_manager(version)
        # An engine and the one that replaces it listen at different addresses, both known to the gateways.
        names = ("one", "two", "one-again", "two-again")
        self._addresses = {name: f"unix:{folder}/{name}.sock" for name in names}
        try:
            self.engines = {name: self.start_engine(name, version) for name in ("one", "two")}
            self.gateways = [self._start_gateway(version, _GATEWAYS) for _ in range(2)]
            for engine in self.engines.values():
                self._wait_for_links(engine)
        except RuntimeError:
            self.kill()
            raise

    def replace(self, kind: str, version: Version, between: Callable[[], None]) -> None:
        """Replace all services of a kind, one after the other. `between` is called after each."""
        if kind == "kvmanager":
            assert self.manager.close() == 0
            self.manager = self._start_manager(version)
            wait_until(lambda: self.pools().keys() == self.engines.keys(), "the engines are attached again")
            between()
        elif kind == "engine":
            for name in tuple(self.engines):
                other = name.removesuffix("-again") if name.endswith("-again") else f"{name}-again"
                self.add_engine(other, version)
                assert self.engines.pop(name).close() == 0
                between()
        else:
            for number, gateway in enumerate(self.gateways):
                assert gateway.close() == 0
                self.gateways[number] = self._start_gateway(version, gateway.address)
                between()

    def add_engine(self, name: str, version: Version, *options: str) -> None:
        """Start an engine, and wait until both gateways use it."""
        self.engines[name] = self.start_engine(name, version, *options)
        self._wait_for_links(self.engines[name])

    def pools(self) -> dict[str, kvmanager_pb2.PoolInfo]:
        """The pools with an engine."""
        stub = kvmanager_pb2_grpc.KVManagerStub(self.manager.channel)
        pools = stub.ListPools(kvmanager_pb2.ListPoolsRequest(), timeout=CALL_SECONDS).pools
        return {pool.engine_id: pool for pool in pools}

    def close(self) -> None:
        """Stop all services. Raises if one fails."""
        statuses = [one.close() for one in (*self.gateways, *self.engines.values(), self.manager)]
        assert set(statuses) == {0}

    def kill(self) -> None:
        """End what still runs."""
        for service in self.all:
            if service.process.poll() is None:
                service.kill()

    def _wait_for_links(self, engine: VersionedService) -> None:
        for gateway in self.gateways:
            gateway.output.wait_for(f"engine at {engine.address} serves")

    def _start_manager(self, version: Version) -> VersionedService:
        return self._start(
            version, "kvmanager", "--listen", f"unix:{self._folder}/kvmanager.sock", "--grace-seconds", "0.1"
        )

    def start_engine(self, name: str, version: Version, *options: str) -> VersionedService:
        """Start an engine that may be refused by the KV manager."""
        return self._start(
            *(version, "engine", "--listen", self._addresses[name], "--engine-id", name, "--model", self._model),
            *("--kvmanager", self.manager.address, "--device-blocks", "512", "--device", "cpu", "--threads", "1"),
            # Requests that run when it drains continue at an engine that may be of the other version.
            *("--grace-seconds", "0.2", "--seconds-without-kvmanager", str(CALL_SECONDS), *options),
        )

    def _start_gateway(self, version: Version, listen: str) -> VersionedService:
        engines = ",".join(self._addresses.values())
        gateway = self._start(
            *(version, "gateway", "--listen", listen, "--engines", engines, "--kvmanager", self.manager.address),
            *("--failovers", "20", "--failover-seconds", str(CALL_SECONDS), "--grace-seconds", str(CALL_SECONDS)),
        )
        gateway.output.wait_for("gateway is ready")
        return gateway

    def _start(self, version: Version, label: str, *arguments: str) -> VersionedService:
        service = VersionedService(version, label, *arguments)
        self.all.append(service)
        return service


class Load:
    """Clients that send requests one after the other until the end, and keep the answer of each."""

    def __init__(self, gateways: Sequence[str], requests: Sequence[gateway_pb2.GenerateRequest]) -> None:
        self._requests = requests
        options = [*transport.channel_options(), *_OPTIONS]
        self._channel = grpc.insecure_channel("ipv4:" + ",".join(gateways), options=options)
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)
        self._over, self._answered = threading.Event(), threading.Semaphore(0)
        self.answers: list[tuple[int, Answer]] = []
        self._threads = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._threads.submit(self._send, first) for first in range(CLIENTS)]

    def wait_for_answers(self) -> None:
        """Wait until each client could have received another answer."""
        for _ in range(CLIENTS):
            while not self._answered.acquire(timeout=1):
                self._raise_failures()

    def finish(self) -> None:
        """End the load. Raises the first failure of a client."""
        self._over.set()
        self._threads.shutdown()
        self._channel.close()
        self._raise_failures()

    def _send(self, number: int) -> None:
        while not self._over.is_set():
            answer = Answer.of(self._stub.Generate(self._requests[number], timeout=CALL_SECONDS))
            self.answers.append((number, answer))
            self._answered.release()
            number = (number + CLIENTS - 1) % len(self._requests)

    def _raise_failures(self) -> None:
        for client in self._clients:
            if client.done() and (failure := client.exception()):
                raise failure
