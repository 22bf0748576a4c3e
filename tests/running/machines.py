"""Two machines on one: network namespaces with a link between them. They require root and iproute2."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.running_quire import ANY_METRICS_PORT, COMMAND, EXACT, RUNTIME_FOLDER, STACKS, Output, Running

PORT = 29511
_SUBNET = "10.213.77"


def available() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Machine:
    """A network namespace. Its files and Unix sockets are those of this machine."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.interface = f"quire{number}"
        self.address = f"{_SUBNET}.{number + 1}"
        self._space = f"quire-test-{os.getpid()}-{number}"
        _ip("netns", "add", self._space)

    def take(self, interface: str) -> None:
        """Take an end of a link as this machine's interface."""
        _ip("link", "set", interface, "netns", self._space)
        self._ip("link", "set", interface, "name", self.interface)
        self._ip("address", "add", f"{self.address}/24", "dev", self.interface)
        for one in (self.interface, "lo"):
            self._ip("link", "set", one, "up")

    def disconnect(self) -> None:
        """Take the link down: packets are lost, and no end of a connection receives an error."""
        self._ip("link", "set", self.interface, "down")

    def torchrun(self, master: str, machines: int, *arguments: str, **environment: str) -> "Ranks":
        """Start this machine's rank as torchrun does: `arguments` are those of `quire`."""
        torchrun = Path(sys.executable).with_name("torchrun")
        command = ["ip", "netns", "exec", self._space, str(torchrun), "--nnodes", str(machines)]
        command += ["--node-rank", str(self.number), "--nproc-per-node", "1"]
        command += ["--master-addr", master, "--master-port", str(PORT), "-m", COMMAND, *arguments]
        return Ranks(command, {"GLOO_SOCKET_IFNAME": self.interface, **environment})

    def remove(self) -> None:
        _ip("netns", "delete", self._space)

    def _ip(self, *arguments: str) -> None:
        _ip("-netns", self._space, *arguments)


class Ranks(Running):
    """torchrun with the ranks of one machine."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        own = {**ANY_METRICS_PORT, **EXACT, **STACKS, "QUIRE_RUNTIME": RUNTIME_FOLDER}
        self.process = subprocess.Popen(
            command,
            cwd=Path(__file__).parent.parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **own, **environment},
        )
        self.output = Output(self.process)

    def close(self) -> int:
        """Stop it if it runs, and return the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.ended()


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Make two machines with a link."""
    machines = (Machine(0), Machine(1))
    ends = [f"quire{os.getpid() % 100000}{end}" for end in "ab"]
    try:
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for machine, end in zip(machines, ends, strict=True):
            machine.take(end)
        yield machines
    finally:
        for machine in machines:
            machine.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
