"""CUDA's streams and events on a CPU: nothing runs later, but accesses that no event orders are found.

Each stream has a vector clock (Fidge 1988, Mattern 1989); an event is a copy of one. Of two accesses to the same
memory, one of them a write, the later one's clock must include the earlier one. The order in which a GPU happens to run
the streams does not matter, so one run shows every missing wait.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Race(AssertionError):
    """Two accesses to the same memory on different streams that nothing orders."""


class FakeEvent:
    def __init__(self, cuda: "FakeCuda", clock: dict[str, int] | None = None) -> None:
        self._cuda = cuda
        self.clock = clock or {}

    def record(self, stream: "FakeStream | None" = None) -> None:
        self.clock = dict((stream or self._cuda.current).clock)

    def synchronize(self) -> None:
        """Let the host wait."""
        self._cuda.host.wait_event(self)

    def query(self) -> bool:
        return False  # the latest possible end

    def wait(self, stream: "FakeStream | None" = None) -> None:
        (stream or self._cuda.current).wait_event(self)


class FakeStream:
    def __init__(self, cuda: "FakeCuda", name: str, device: int | None = None) -> None:
        self._cuda = cuda
        self.name = name
        self.device = device
        self.clock: dict[str, int] = defaultdict(int)

    def wait_event(self, event: FakeEvent) -> None:
        for name, time in event.clock.items():
            self.clock[name] = max(self.clock[name], time)

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> FakeEvent:
        return FakeEvent(self._cuda, dict(self.clock))


class FakeRuntime:
    """Pins nothing."""

    def __getattr__(self, _: str) -> Callable[..., int]:
        return lambda *_: 0


class FakeGraph:
    """A graph that is never replayed."""

    def __init__(self) -> None:
        self.memory: object = None

    def pool(self) -> object:
        return self.memory

    def replay(self) -> None:
        raise AssertionError("a graph of these tests is never replayed")


class FakeCuda:
    """Streams of one device, and the host. `current` is the stream that launches go to.

    `device` is the thread's current device, which starts as 0 whatever device the streams belong to.
    """

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.host = FakeStream(self, "host")
        self.device = 0
        self.current = self.stream("compute")
        self.capturing = False
        self._written: dict[Hashable, tuple[str, int]] = {}
        self._read: dict[Hashable, dict[str, int]] = defaultdict(dict)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace torch's streams."""
        patch.setattr(torch.cuda, "Stream", lambda *on: self.stream(f"stream {len(self.streams)}", *on))
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "stream", self.using)
        patch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(self))
        patch.setattr(torch.cuda, "device", self.on)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(torch.cuda, "cudart", FakeRuntime)

    def stream(self, name: str, device: torch.device | None = None) -> FakeStream:
        self.streams.append(FakeStream(self, name, device.index if device else None))
        return self.streams[-1]

    def synchronize(self, _device: torch.device) -> None:
        for one in self.streams:
            self.host.wait_stream(one)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, self.device if device.index is None else device.index
        try:
            yield
        finally:
            self.device = before

    def install_graphs(self, patch: pytest.MonkeyPatch) -> list["FakeGraph"]:
        """Replace torch's graphs, and return those that are captured from now on."""
        graphs: list[FakeGraph] = []

        @contextmanager
        def graph(captured: FakeGraph, pool: object, stream: FakeStream | None = None) -> Iterator[None]:
            graphs.append(captured)
            captured.memory = pool or object()
            with self.using(stream or self.stream("torch's own")):
                self.capturing = True
                try:
                    yield
                finally:
                    self.capturing = False

        patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        patch.setattr(torch.cuda, "graph", graph)
        return graphs

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        device, self.device = self.device, self.device if stream.device is None else stream.device
        try:
            yield
        finally:
            self.current, self.device = before, device

    def launch(self, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        """Note what work on the current stream accesses, unless it is only captured. Raises Race."""
        if self.capturing:
            return
        self.current.wait_stream(self.host)  # it is launched behind what the host has done
        self._access(self.current, reads, writes)

    def on_host(self, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        """Note what the host itself accesses now. Raises Race."""
        self._access(self.host, reads, writes)

    def _access(self, stream: FakeStream, reads: Iterable[Hashable], writes: Iterable[Hashable]) -> None:
        stream.clock[stream.name] += 1
        stamp = (stream.name, stream.clock[stream.name])
        for memory in reads:
            self._after(stream, memory, "read", "written", *self._written.get(memory, stamp))
            self._read[memory][stream.name] = stamp[1]
        for memory in writes:
            self._after(stream, memory, "written", "written", *self._written.get(memory, stamp))
            for reader, time in self._read.pop(memory, {}).items():
                self._after(stream, memory, "written", "read", reader, time)
            self._written[memory] = stamp

    def _after(self, stream: FakeStream, memory: Hashable, access: str, earlier: str, name: str, time: int) -> None:
        if stream.clock[name] < time:
            raise Race(f"{memory} is {access} on {stream.name} while it is {earlier} on {name}")


class AccessedBlocks:
    """An attention backend without contents that notes which blocks of which tier it accesses."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.launches = 0

    def swap(self, copies: Any, direction: Any) -> None:
        self.launches += 1
        tiers = ("device", "host") if direction.name == "DEVICE_TO_HOST" else ("host", "device")
        self._cuda.launch([(tiers[0], one.source) for one in copies], [(tiers[1], one.destination) for one in copies])

    def copy_blocks(self, copies: Any) -> None:
        self._cuda.launch([("device", one.source) for one in copies], [("device", one.destination) for one in copies])


class NotedLaunches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch's operators access, as launches on the current stream: the memory of a tensor is its storage.

    Operators whose results are views access nothing.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda = cuda
        self._kept: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, results = (
            [one for one in tree_leaves(part) if torch.is_tensor(one)] for part in ((args, kwargs), found)
        )
        if not func.is_view:
            self._kept += [*given, *results]
            names = ([one.untyped_storage().data_ptr() for one in part] for part in (given, results))
            self._cuda.launch(*names)
        return found
