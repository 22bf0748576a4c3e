"""The structure of a simulated process: all that it does next, except for what arrives from the network.

Ends of connections belong to the process that reads there. A connection's other end is part of another process.
"""

import asyncio

from simulation.event_loop import SimulatedLoop
from simulation.exhaustive import suspended
from simulation.exhaustive.held_network import ConnectionName, NamedConnection
from simulation.exhaustive.structure import Structure, register
from simulation.network.connections import Call, Pipe
from simulation.processes.process import Process

suspended.register_all()


class ProcessStructure(Structure):
    """The structure of a process, and the names of the connections that it refers to."""

    def __init__(self, process: Process, connections_made: int) -> None:
        """The name of its next connection follows from how many it has made."""
        super().__init__()
        self.own = process.loop
        self.connections: set[ConnectionName] = set()
        self.add_all((process, connections_made))


def _loop(structure: Structure, loop: SimulatedLoop) -> None:
    assert isinstance(structure, ProcessStructure), "loops belong to processes"
    assert loop is structure.own, "a process refers to its own loop only"
    if structure.begins(loop, "loop"):
        tasks = list(loop._tasks)
        for task in tasks:  # all numbered before one is written, because sets contain them
            structure.begins(task, "task")
        for task in tasks:
            suspended.write_task(structure, task)
        structure.add_all(one for one in loop._ready if not one.cancelled())
        structure.add_all(timers_of(loop))
        structure.add(loop.failures)


def has_callbacks(process: Process) -> bool:
    """Return whether callbacks of the process's loop wait, beside timers that are due."""
    return any(not one.cancelled() for one in process.loop._ready)


def timers_of(loop: SimulatedLoop) -> list[asyncio.TimerHandle]:
    """Return the timers of a loop in the order of their times."""
    return [timer for _, _, timer in sorted(loop._timers, key=lambda one: one[:2]) if not timer.cancelled()]


def _connection(structure: Structure, connection: NamedConnection) -> None:
    assert isinstance(structure, ProcessStructure), "connections belong to processes"
    structure.connections.add(connection.name)
    if structure.begins(connection, str(connection.name)) and connection.client is structure.own:
        structure.add(connection.calls)


def _call(structure: Structure, call: Call) -> None:
    assert isinstance(structure, ProcessStructure), "calls belong to processes"
    if structure.begins(call, "call"):
        structure.add(call.connection)
        if call.connection.client is structure.own:
            structure.add_all((call._ended, call.responses))
        else:
            structure.add_all((call._handling, call.requests))


def _pipe(structure: Structure, pipe: Pipe) -> None:
    assert isinstance(structure, ProcessStructure), "pipes belong to processes"
    if structure.begins(pipe, "pipe") and pipe._receiver is structure.own:
        structure.add_all((pipe._arrived, pipe._reader))


register(_loop, SimulatedLoop)
register(_connection, NamedConnection)
register(_call, Call)
register(_pipe, Pipe)
