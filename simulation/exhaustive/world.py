"""The small universe: its processes, in which one choice after another is made."""

import heapq
import math
from collections.abc import Callable
from pathlib import Path
from random import Random

from simulation.exhaustive.held_network import HeldNetwork
from simulation.exhaustive.process_structure import ProcessStructure, has_callbacks
from simulation.exhaustive.small_engine import SmallEngine, SmallRequest
from simulation.exhaustive.state import (
    MANAGER,
    NEWER,
    OLDER,
    PAUSE_SECONDS,
    Choice,
    Effect,
    Kind,
    Local,
    Spent,
    State,
    tick,
)
from simulation.network.connections import Latency
from simulation.processes.manager import ManagerLimits, ManagerProcess
from simulation.processes.process import Process
from simulation.universe import Universe

# Shorter than usual, so that a lease expires at one of the first timers.
LIMITS = ManagerLimits(lease_seconds=0.25)

_NUMBERS = {OLDER: 1, NEWER: 2}


class World(Universe):
    """A KV manager and the older engine; choices start the newer one. Nothing happens between two choices."""

    network: HeldNetwork

    def __init__(self, requests: tuple[SmallRequest, ...], locals_: dict[bytes, Local]) -> None:
        """`locals_` has the processes of all worlds, by digest, so that equal ones are one object."""
        super().__init__(Random(0), Path(), Latency())
        self.network = HeldNetwork(self.clock)
        self.by_label: dict[str, Process] = {}
        self.refused: dict[str, str] = {}  # why engines were refused
        self.begun = self.now
        self._requests = requests
        self._locals = locals_
        self._runs: dict[Kind, Callable[[str], None]] = {
            Kind.TURN: self._turn,
            Kind.CALL_BACK: self._call_back,
            Kind.WAKE: self._wake,
            Kind.START: self._start,
        }
        for label in (f"{MANAGER} 1", OLDER):
            self.make(Choice(Kind.START, label))

    def make(self, part: Choice) -> str:
        """Make a part of a choice; return what happened, in words. An engine that was refused ends."""
        self.network.forget_changes()
        words = f"{part.kind.value}{self._do(part)}"
        process = self.by_label.get(part.process)
        if process is None or not process.exit:
            return words
        self.refused[part.process] = process.exit
        self.kill(self.by_label.pop(part.process))
        return f"{words}, and ends: {process.exit}"

    def _do(self, part: Choice) -> str:
        """Do what a part of a choice is; return details in words."""
        match part:
            case Choice(Kind.DELIVER, label, queue) if queue is not None:
                held = self.network.deliver(queue)
                self._call_back(label)
                return f" {held.words(queue.kind)} ({queue.connection})"
            case Choice(Kind.CUT, _, _, connection) if connection is not None:
                self.network.connections[connection].cut()
            case Choice(Kind.END, label):
                self.kill(self.by_label.pop(label))
            case Choice(kind, label):
                self._runs[kind](label)
        return ""

    def _turn(self, label: str) -> None:
        self.by_label[label].run_thread()

    def effect(self, part: Choice) -> Effect:
        """Return what a part of a choice, which was made, has done."""
        sent, broken = self.network.changes()
        local = self._local(part.process) if part.process in self.by_label else None
        return Effect(local, sent, broken, self.refused.get(part.process))

    def state(self, spent: Spent) -> State:
        """Return the state of all processes and of the network."""
        queues = {name: tuple(one.digest for one in held) for name, held in self.network.queues.items()}
        processes = {label: self._local(label) for label in self.by_label}
        return State(self.now, processes, queues, self.network.broken(), spent).without_lost()

    def _local(self, label: str) -> Local:
        structure = ProcessStructure(self.by_label[label], self.network.made_by(label))
        digest = structure.digest()
        if digest not in self._locals:
            self._locals[digest] = self._described(self.by_label[label], structure, digest)
        return self._locals[digest]

    def _described(self, process: Process, structure: ProcessStructure, digest: bytes) -> Local:
        attached, unfinished = False, tuple[str, ...]()
        if isinstance(process, SmallEngine):
            attached, unfinished = process.attached, process.unfinished
        return Local(
            digest,
            has_callbacks(process),
            self._turn_at(process),
            process.loop.next_timer(),
            frozenset(structure.connections),
            attached,
            unfinished,
        )

    def _turn_at(self, process: Process) -> float | None:
        """Return when the thread of a process can run."""
        return -math.inf if process.thread_can_run(-math.inf) else process.thread_wakes_at()

    # What processes do.

    def _start(self, label: str) -> None:
        process: Process
        if label.startswith(MANAGER):
            process = ManagerProcess(self.network, self.clock, int(label.removeprefix(MANAGER)), LIMITS, self.ending)
        else:
            process = SmallEngine(self.network, self.clock, _NUMBERS[label], self._requests)
        self.by_label[label] = self._add(process)
        self.network.labels[process.loop] = label
        self._call_back(label)

    def _call_back(self, label: str) -> None:
        """Run the callbacks of a process until none is left."""
        loop = self.by_label[label].loop
        while loop.has_ready():
            loop.run_one()

    def _wake(self, label: str) -> None:
        """Let time pass until a process wakes, except for a short pause, and run its timer or its thread."""
        process = self.by_label[label]
        turn_at, timer_at = self._turn_at(process), process.loop.next_timer()
        turns = turn_at is not None and self.now < turn_at < (math.inf if timer_at is None else timer_at)
        at = turn_at if turns else timer_at
        assert at is not None, "it wakes"
        if at > self.now + PAUSE_SECONDS:
            self.now = tick(at)
        elif at > self.now and not turns:  # this pause ends, the others of the process do not
            process.loop.run(heapq.heappop(process.loop._timers)[2]._run)
        if turns:
            process.run_thread()
        else:
            self._call_back(label)
