"""Messages that are legal on the wire but expensive or invalid, and their effect on a running KV manager.

`Neighbour` is another engine of the same manager, in its own process, which measures its Steps.
"""

import itertools
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from quire.v1 import kvmanager_pb2 as pb
from services.runtime import transport

MIB = 1 << 20
CALL_SECONDS = 120
_ATTACH = "/quire.v1.KVManager/Attach"
_PAUSE_SECONDS = 0.001


def varint(value: int) -> bytes:
    """Encode a protobuf varint; a negative one has ten bytes."""
    value &= (1 << 64) - 1
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def field(number: int, payload: bytes) -> bytes:
    """Encode a field of bytes or of a message."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def step(*parts: bytes, number: int = 1) -> bytes:
    """Encode a PoolRequest with a Step of these fields."""
    return field(3, b"\x08" + varint(number) + b"".join(parts))


def report(*parts: bytes) -> bytes:
    """Encode a PoolRequest with a page of a report."""
    return field(2, b"".join(parts))


def register(engine_id: str = "hostile", **fields: Any) -> bytes:
    usual = {"incarnation": 5, "model_fingerprint": "m", "block_size": 16, "device_blocks": 10_000, "host_blocks": 100}
    return pb.PoolRequest(register=pb.Register(engine_id=engine_id, **(usual | fields))).SerializeToString()


EMPTY_REPORT = pb.PoolRequest(report=pb.ReportPage(last=True)).SerializeToString()


def many(entry: bytes, size: int) -> bytes:
    """Repeat an entry up to `size` bytes."""
    return entry * (size // len(entry))


@dataclass(frozen=True)
class Hostile:
    """Messages of a stream after its Register and, unless `reports` is set, an empty report."""

    name: str
    messages: tuple[bytes, ...]
    reports: bool = False


def _steps(name: str, size: int, entry: bytes) -> Hostile:
    return Hostile(name, (step(many(entry, size)),))


_FREE = field(5, b"\x08\x07\x10\x01")
_ALLOCATE = b"\x08\x01\x10\x01\x30\x01"  # group, sequence, compute_tokens


def shapes() -> Iterator[Hostile]:
    """Yield the hostile streams one at a time, because they are large."""
    for size, unit in ((64 << 10, "64 KiB"), (4 * MIB, "4 MiB"), (15 * MIB, "15 MiB"), (60 * MIB, "60 MiB")):
        yield _steps(f"{unit} of empty allocates", size, field(9, b""))
        yield _steps(f"{unit} of frees", size, _FREE)
    for size, unit in ((1 * MIB, "1 MiB"), (7 * MIB, "7 MiB")):
        yield _steps(f"{unit} of forks", size, field(4, b""))
        yield _steps(f"{unit} of unpins", size, field(3, field(2, b"")))
        yield _steps(f"{unit} of resets", size, field(3, b"\x18\x01"))
        yield _steps(f"{unit} of swap_outs, each a field", size, b"\x30\x00")
        yield Hostile(f"{unit} of swap_outs, packed", (step(field(6, bytes(size))),))
        yield Hostile(f"{unit} of swap_ins, packed", (step(field(7, bytes(size))),))
        yield Hostile(f"{unit} of lengths, packed", (step(field(10, bytes(size // 2)), field(11, bytes(size // 2))),))
        yield _steps(f"{unit} of lengths, each a field", size, b"\x50\x00\x58\x00")
        yield Hostile(
            f"{unit} of commits", (step(field(2, b"".join(field(n, bytes(size // 4)) for n in (1, 2, 3, 4)))),)
        )
        columns = b"".join(field(n, bytes(size // 5)) for n in (1, 3, 4, 5)) + field(2, many(b"\1", size // 5))
        yield Hostile(f"{unit} of condemns", (step(field(12, columns)),))
        yield Hostile(f"{unit} of condemned blocks", (step(field(12, field(6, bytes(size)))),))
        yield _steps(f"{unit} of condemned blocks, each a field", size, field(12, b"\x30\x00"))
        yield _steps(f"{unit} of commits, each a message", size, field(2, b""))
        yield _steps(f"{unit} of commits' tokens, each a field", size, field(2, b"\x20\x00"))
        yield Hostile(f"{unit} of extends", (step(field(8, b"".join(field(n, bytes(size // 3)) for n in (1, 3, 4)))),))
        yield Hostile(f"{unit} of one allocate's tokens", (step(field(9, _ALLOCATE + field(5, bytes(size)))),))
        yield Hostile(
            f"{unit} of one allocate's tokens, each a field", (step(field(9, _ALLOCATE + many(b"\x28\x00", size))),)
        )
        yield Hostile(
            f"{unit} of one allocate's tokens below 0", (step(field(9, _ALLOCATE + field(5, many(varint(-1), size)))),)
        )
        yield Hostile(f"{unit} of a request id", (step(field(9, _ALLOCATE + field(3, b"a" * size) + field(5, b"\1"))),))
        yield Hostile(f"{unit} of a salt", (step(field(9, _ALLOCATE + field(4, bytes(size)) + field(5, b"\1"))),))
        yield Hostile(
            f"{unit} of a trace_parent", (step(field(9, _ALLOCATE + field(9, b"a" * size) + field(5, b"\1"))),)
        )
        yield Hostile(f"{unit} of an unpin's id", (step(field(3, field(2, b"a" * size))),))
        yield _steps(f"{unit} of unknown fields", size, b"\xa0\x06\x00")
        yield _steps(f"{unit} of the number of the Step", size, b"\x08\x01")
        yield Hostile(
            f"{unit} of groups in groups", (field(3, many(b"\xa3\x06", size // 2) + many(b"\xa4\x06", size // 2)),)
        )
        yield Hostile(f"{unit} of empty Steps", (many(field(3, b""), size),))
        yield Hostile(f"{unit} of Registers", (many(field(1, b""), size),), reports=True)
        yield Hostile(f"{unit} of sequences in a report", (report(many(field(1, b""), size)),), reports=True)
        yield Hostile(
            f"{unit} of blocks of one sequence in a report", (report(field(1, field(4, bytes(size)))),), reports=True
        )
        yield Hostile(
            f"{unit} of a sequence's request id in a report", (report(field(1, field(3, b"a" * size))),), reports=True
        )
        yield Hostile(f"{unit} of release order in a report", (report(field(4, bytes(size))),), reports=True)
        yield Hostile(f"{unit} of pins in a report", (report(many(field(5, b""), size)),), reports=True)
        yield Hostile(f"{unit} of a pin's id in a report", (report(field(5, field(1, b"a" * size))),), reports=True)
        yield Hostile(f"{unit} of a pin's blocks in a report", (report(field(5, field(2, bytes(size)))),), reports=True)
        yield Hostile(f"{unit} of keys in a report", (report(field(3, bytes(size))),), reports=True)
        yield Hostile(f"{unit} of keyed blocks in a report", (report(field(2, bytes(size))),), reports=True)
    yield Hostile("200,000 empty pages of a report", (report(),) * 200_000, reports=True)
    ids = [field(9, _ALLOCATE + field(3, b"%0200d" % n) + field(5, b"\1")) for n in range(5_000)]
    yield Hostile("40 Steps of 5,000 allocates that are refused", tuple(step(*ids, number=n) for n in range(1, 41)))


class Neighbour:
    """Another engine, which sends small Steps continuously."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "tests.services.kvmanager.hostile_messages", address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.waits()

    def waits(self) -> tuple[float, int]:
        """Return the milliseconds of the slowest Step since the last call, and the number of Steps."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        longest, steps = json.loads(self._process.stdout.readline())
        return longest, steps

    def close(self) -> None:
        """Stop it and check that all its Steps were answered."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        assert self._process.wait(CALL_SECONDS) == 0
        self._process.stdout.close()


def send(address: str, hostile: Hostile, engine_id: str = "hostile") -> tuple[list[bytes], grpc.StatusCode, str]:
    """Send the messages, half-close the stream, and return its answers, status and details."""
    begin = [register(engine_id), *([] if hostile.reports else [EMPTY_REPORT])]
    answers: list[bytes] = []
    with grpc.insecure_channel(address, options=transport.channel_options()) as channel:
        attach: Any = channel.stream_stream(_ATTACH)
        call = attach(iter([*begin, *hostile.messages]), timeout=CALL_SECONDS)
        try:
            for answer in call:
                answers.append(answer)
        except grpc.RpcError:
            pass
        return answers, call.code(), call.details() or ""


def resident_mib(pid: int, which: str = "VmRSS") -> float:
    """Return a process's memory now, or with VmHWM the peak since `reset_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1]) / 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _do_steps(address: str) -> None:
    longest, steps = 0.0, 0
    ended, asked = threading.Event(), threading.Event()

    def listen() -> None:
        for _ in sys.stdin:
            asked.set()
        ended.set()

    with grpc.insecure_channel(address, options=transport.channel_options()) as channel:
        messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        messages.put(register("neighbour"))
        messages.put(EMPTY_REPORT)
        attach: Any = channel.stream_stream(_ATTACH)
        answers = attach(iter(messages.get, None))
        next(answers)
        threading.Thread(target=listen, daemon=True).start()
        for number in itertools.count(1):
            if ended.wait(_PAUSE_SECONDS):
                break
            begun = time.perf_counter()
            messages.put(step(number=number))
            next(answers)
            longest, steps = max(longest, time.perf_counter() - begun), steps + 1
            if asked.is_set():  # printed after a Step, so that the one in flight is included
                asked.clear()
                sys.stdout.write(json.dumps((longest * 1000, steps)) + "\n")
                sys.stdout.flush()
                longest, steps = 0.0, 0
        messages.put(None)
        assert list(answers) == []


if __name__ == "__main__":
    _do_steps(sys.argv[1])
