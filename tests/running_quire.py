"""A running `quire serve`, as a user would start it, and clients to call it."""

import atexit
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import (
    decoding_pb2,
    engine_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    kvmanager_pb2,
    kvmanager_pb2_grpc,
)
from services.runtime import transport
from services.runtime.logs.records import message_of
from tests.scrape import Scrape

# The command `quire`, and the same with engines that slow some requests down.
COMMAND = "services.cli.main"
SLOW_ENGINE = "tests.running.slow_engine"
START_SECONDS = 150
STOP_SECONDS = 60
CALL_SECONDS = 120
ANY_METRICS_PORT = {
    f"QUIRE_{command}_METRICS_LISTEN": "127.0.0.1:0" for command in ("SERVE", "KVMANAGER", "ENGINE", "GATEWAY")
}
# Tests compare tokens.
EXACT = {f"QUIRE_{command}_DTYPE": "float32" for command in ("SERVE", "ENGINE")}
# A pool of the default size takes the system seconds to allocate; the demo model's blocks need it.
SMALL_POOL = {f"QUIRE_{command}_CACHE_MIB": "64" for command in ("SERVE", "ENGINE")}
_POOL_OPTIONS = ("--device-blocks", "--cache-mib", "--gpu-memory-utilization")
# An aborted process prints the stacks of its threads.
STACKS = {"PYTHONFAULTHANDLER": "1"}
# The user's own `quire` commands must not find the services of tests.
RUNTIME_FOLDER = tempfile.mkdtemp(prefix="quire-test-runtime-")
atexit.register(shutil.rmtree, RUNTIME_FOLDER, ignore_errors=True)


class Output:
    """The output of a process, with a wait for a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._process = process
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, seconds: float = START_SECONDS, after: int = 0) -> str:
        """Return the first line from number `after` on that contains `text`; of a JSON line, the message."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                if found := next((line for line in self.lines[after:] if text in line), None):
                    return message_of(found)
                if self._ended or not self._changed.wait(deadline - time.monotonic()):
                    raise RuntimeError(f"no line with {text!r}:\n" + "\n".join(self.lines))

    def finish(self) -> None:
        """Wait until the process has closed its output."""
        self._reader.join(timeout=STOP_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._take(line.rstrip("\n"))
        self._take(None)

    def _take(self, line: str | None) -> None:
        with self._changed:
            if line is None:
                self._ended = True
            else:
                self.lines.append(line)
            self._changed.notify_all()


class Running:
    """A process with its output."""

    process: subprocess.Popen[str]
    output: Output

    def ended(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the exit status. Raises RuntimeError with output and stacks if the process does not end."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
            self.output.finish()
            raise RuntimeError(f"the process runs after {seconds} s:\n" + "\n".join(self.output.lines)) from None
        self.output.finish()
        return status


class RunningQuire(Running):
    """The three services as processes, and channels to them."""

    def __init__(self, process: subprocess.Popen[str], output: Output, folder: Path) -> None:
        self.process = process
        self.output = output
        self.lines = output.lines
        self._folder = folder
        services = output.wait_for("ready: gateway at ").split("ready: ")[1].split(", ")
        self.addresses = dict(service.strip().split(" at ") for service in services)
        self.addresses.setdefault("engine", self.addresses.get("engine-0", ""))
        self.channel = open_channel(self.addresses["gateway"])
        self.gateway = gateway_pb2_grpc.GatewayStub(self.channel)
        self._engine_channel = open_channel(self.addresses["engine"])
        self.engine = engine_pb2_grpc.EngineStub(self._engine_channel)
        self._kvmanager_channel = open_channel(self.addresses["KV manager"])
        self.kvmanager = kvmanager_pb2_grpc.KVManagerStub(self._kvmanager_channel)

    @cached_property
    def metrics_urls(self) -> dict[str, str]:
        """The URLs of the services' metrics, from their logs."""
        return {name: metrics_url(self.output, name) for name in ("gateway", "engine", "kvmanager")}

    @property
    def http_url(self) -> str:
        return self.output.wait_for("gateway listens for HTTP at ").split(" at ")[1]

    @property
    def map_url(self) -> str:
        return self.output.wait_for("block map at ").split(" at ")[1]

    def generate(self, request: gateway_pb2.GenerateRequest, timeout: float = CALL_SECONDS) -> "Answer":
        """Raises grpc.RpcError."""
        return Answer.of(self.gateway.Generate(request, timeout=timeout))

    def pool(self) -> kvmanager_pb2.PoolInfo:
        return self.kvmanager.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=CALL_SECONDS).pool

    def settled_pool(self, seconds: float = 60, sequences: int = 0) -> kvmanager_pb2.PoolInfo:
        """Wait until the pool has at most this many sequences: they are freed one step after their last tokens."""
        deadline = threading.Event()
        timer = threading.Timer(seconds, deadline.set)
        timer.start()
        try:
            while (pool := self.pool()).sequences > sequences:
                assert not deadline.wait(0.02), f"more than {sequences} sequences after {seconds} s: {pool}"
            return pool
        finally:
            timer.cancel()

    def open_streams(self) -> float:
        page = Scrape.of(self.metrics_urls["gateway"])
        return page.values("quire_open_streams", "protocol").get("grpc", 0)

    def children(self) -> dict[str, int]:
        return children_of(self.process.pid)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> int:
        """Stop it if it runs, and return the exit status."""
        for channel in (self.channel, self._engine_channel, self._kvmanager_channel):
            channel.close()
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.ended()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


class RunningService(Running):
    """One service as a process, started by its command; engines run requests of SLOW_SEED slowly."""

    def __init__(self, label: str, *arguments: str, module: str = "") -> None:
        """Start `label`'s command, or with a module the command that begins `arguments`."""
        self.label = label
        if module:
            self.process = launch(*arguments, module=module)
        else:
            self.process = launch(label, *arguments, module=SLOW_ENGINE if label == "engine" else COMMAND)
        self.output = Output(self.process)
        self.address = self.output.wait_for("listens on").split("listens on ")[1]
        self.metrics_url = metrics_url(self.output, label)
        self.channel = open_channel(self.address)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> int:
        """Stop it if it runs, and return the exit status."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.terminate()
        return self.ended()


class HealthWatch:
    """A Health.Watch stream with a reader; `statuses` are those received so far."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        self.statuses: list[str] = []
        self._pushed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def next(self, seconds: float = CALL_SECONDS) -> str:
        """Wait for the next status. Raises queue.Empty."""
        return self._pushed.get(timeout=seconds)

    def close(self) -> None:
        self._call.cancel()
        self._reader.join(timeout=STOP_SECONDS)

    def _read(self) -> None:
        try:
            for response in self._call:
                status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
                self.statuses.append(status)
                self._pushed.put(status)
        except grpc.RpcError:
            self._pushed.put("BROKEN")


class Answer:
    """All messages of one generation."""

    def __init__(self) -> None:
        self.started = gateway_pb2.Started()
        self.finished = gateway_pb2.Finished()
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[decoding_pb2.TokenLogprobs] = []
        self.prompt_logprobs: list[decoding_pb2.TokenLogprobs] = []
        self.events: list[str] = []
        self.deltas: list[gateway_pb2.Delta] = []

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
            self.deltas.append(response.delta)
            self.text += response.delta.text
            self.token_ids += response.delta.token_ids
            self.logprobs += response.delta.logprobs
        elif kind == "prompt_logprobs":
            assert response.prompt_logprobs.first_position == len(self.prompt_logprobs) + 1
            self.prompt_logprobs += response.prompt_logprobs.logprobs
        else:
            self.finished = response.finished


def start_quire(*arguments: str) -> RunningQuire:
    """Start `quire serve` on its own Unix socket and wait until it is ready."""
    return start_quires(arguments)[0]


def start_quires(*arguments: tuple[str, ...]) -> list[RunningQuire]:
    """Start one `quire serve` for each tuple of arguments, all together, and wait until each is ready."""
    folders = [Path(tempfile.mkdtemp(prefix="quire-test-")) for _ in arguments]
    processes = [
        launch("serve", "--listen", f"unix:{folder}/gateway.sock", *own, module=SLOW_ENGINE)
        for folder, own in zip(folders, arguments, strict=True)
    ]
    outputs = [Output(process) for process in processes]
    try:
        return [RunningQuire(*parts) for parts in zip(processes, outputs, folders, strict=True)]
    except BaseException:  # one is not ready: none outlives its test
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(STOP_SECONDS)
        raise


def metrics_url(output: Output, label: str) -> str:
    return output.wait_for(f"{label} shows its metrics at ").split(" at ")[1]


def children_of(pid: int) -> dict[str, int]:
    """Process ids of the services of a `quire serve` by name; of several engines, one."""
    commands = [(child.pid, _command_of(child)) for child in psutil.Process(pid).children()]
    return {command[command.index("-m") + 2]: child for child, command in commands if "-m" in command[:-2]}


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it has ended; psutil's ZombieProcess is one
        return []


def open_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=transport.channel_options())


def launch(*arguments: str, module: str = COMMAND, **environment: str) -> subprocess.Popen[str]:
    """Start `quire` or another module, with its output in one pipe, and without HTTP unless it is given."""
    for option, commands in (("--http-listen", ("serve", "gateway")), ("--map-listen", ("serve", "kvmanager"))):
        if arguments[0] in commands and option not in arguments:
            arguments = (arguments[0], option, "", *arguments[1:])
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **_own(*arguments), **STACKS, "QUIRE_RUNTIME": RUNTIME_FOLDER, **environment},
    )


def _own(command: str, *options: str) -> dict[str, str]:
    """Return the variables of tests that this command reads: it warns of those of other commands."""
    prefix = f"QUIRE_{command.upper()}_"
    is_small = "demo" not in options and "--model" in options and not set(options).intersection(_POOL_OPTIONS)
    every = {**ANY_METRICS_PORT, **EXACT, **(SMALL_POOL if is_small else {})}
    return {name: value for name, value in every.items() if name.startswith(prefix)}
