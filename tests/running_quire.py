"""A running `quire serve`, as a user would start it, and clients to call it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import grpc

from quire.v1 import (
    gateway_pb2,
    gateway_pb2_grpc,
    kvmanager_pb2,
    kvmanager_pb2_grpc,
)
from services import transport

START_SECONDS = 90
STOP_SECONDS = 60
CALL_SECONDS = 120


class RunningQuire:
    """The three services as processes of their own, and channels to them."""

    def __init__(
        self,
        process: subprocess.Popen[str],
        addresses: dict[str, str],
        lines: list[str],
        reader: threading.Thread,
    ) -> None:
        self.process = process
        self._reader = reader
        self.addresses = addresses
        self.lines = lines
        self.channel = grpc.insecure_channel(addresses["gateway"], options=transport.channel_options())
        self.gateway = gateway_pb2_grpc.GatewayStub(self.channel)
        self._kvmanager_channel = grpc.insecure_channel(addresses["KV manager"], options=transport.channel_options())
        self.kvmanager = kvmanager_pb2_grpc.KVManagerStub(self._kvmanager_channel)

    def generate(self, request: gateway_pb2.GenerateRequest, timeout: float = CALL_SECONDS) -> "Answer":
        """Run a request to its end. Raises grpc.RpcError."""
        return Answer.of(self.gateway.Generate(request, timeout=timeout))

    def pool(self) -> kvmanager_pb2.PoolInfo:
        return self.kvmanager.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=10).pool

    def settled_pool(self, seconds: float = 20) -> kvmanager_pb2.PoolInfo:
        """Return the pool once no sequence is left in it: the last frees follow the last tokens by a step."""
        deadline = threading.Event()
        timer = threading.Timer(seconds, deadline.set)
        timer.start()
        try:
            while (pool := self.pool()).sequences and not deadline.wait(0.02):
                pass
            return pool
        finally:
            timer.cancel()

    def children(self) -> dict[str, int]:
        """Process ids of the services by name."""
        rows = subprocess.run(
            ["ps", "--no-headers", "-o", "pid,args", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        pids = {}
        for row in rows:
            if found := re.match(r"\s*(\d+) .*services\.cli\.main (\w+)", row):
                pids[found[2]] = int(found[1])
        return pids

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> int:
        """Stop it if it runs, and return the exit status."""
        self.channel.close()
        self._kvmanager_channel.close()
        if self.process.poll() is None:
            self.terminate()
        status = self.process.wait(timeout=STOP_SECONDS)
        self._reader.join(timeout=STOP_SECONDS)
        return status


class Answer:
    """All messages of one generation."""

    def __init__(self) -> None:
        self.started = gateway_pb2.Started()
        self.finished = gateway_pb2.Finished()
        self.text = ""
        self.token_ids: list[int] = []
        self.events: list[str] = []

    @classmethod
    def of(cls, responses: Iterator[gateway_pb2.GenerateResponse]) -> "Answer":
        answer = cls()
        for response in responses:
            answer.add(response)
        return answer

    def add(self, response: gateway_pb2.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        self.events.append(kind)
        if kind == "started":
            self.started = response.started
        elif kind == "delta":
            self.text += response.delta.text
            self.token_ids += response.delta.token_ids
        else:
            self.finished = response.finished


def start_quire(*arguments: str) -> RunningQuire:
    """Start `quire serve` on a Unix socket of its own and wait until it is ready."""
    folder = tempfile.mkdtemp(prefix="quire-test-")
    process = launch("serve", "--listen", f"unix:{folder}/gateway.sock", *arguments)
    lines: list[str] = []
    ready: Future[dict[str, str]] = Future()
    reader = threading.Thread(target=_read_lines, args=(process, lines, ready), daemon=True)
    reader.start()
    return RunningQuire(process, ready.result(timeout=START_SECONDS), lines, reader)


def launch(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the command `quire` with its output as text in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", *arguments],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


def _read_lines(process: subprocess.Popen[str], lines: list[str], ready: "Future[dict[str, str]]") -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if "| ready: " in line and not ready.done():
                places = line.split("| ready: ")[1].split(", ")
                ready.set_result(dict(place.strip().split(" at ") for place in places))
    if not ready.done():
        ready.set_exception(RuntimeError("quire serve ended early:\n" + "\n".join(lines)))
