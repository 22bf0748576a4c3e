"""A connection that a test can break: it forwards bytes from its TCP port to a service's Unix socket."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_WAIT_SECONDS = 60
_SILENCE_SECONDS = 0.2
_CHUNK_BYTES = 65536


class Direction:
    """One direction of a connection."""

    def __init__(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, delay_seconds: float) -> None:
        self.waiting_bytes = 0
        self.lost_bytes = 0
        self.open = asyncio.Event()
        self.open.set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._source = source
        self._target = target
        self._delay_seconds = delay_seconds
        self._arrived: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def carry(self, notify: Callable[[], None]) -> None:
        """Forward bytes until the source ends, then end the target. `notify` is called when counts change."""
        reading = asyncio.create_task(self._read(notify))
        try:
            await self._write(notify)
        finally:
            reading.cancel()
            self._target.close()

    async def _read(self, notify: Callable[[], None]) -> None:
        data = b"not empty"
        while data:
            data = b""
            with suppress(OSError):
                data = await self._source.read(_CHUNK_BYTES)
            self.waiting_bytes += len(data)
            self._arrived.put_nowait((asyncio.get_running_loop().time() + self._delay_seconds, data))
            notify()

    async def _write(self, notify: Callable[[], None]) -> None:
        while True:
            due, data = await self._arrived.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            await self.open.wait()
            if not data:
                await self.may_end.wait()
                return
            self.waiting_bytes -= len(data)
            if self._target.transport.is_closing():
                self.lost_bytes += len(data)
                notify()
                continue
            self._target.write(data)
            with suppress(OSError):
                await self._target.drain()


class Connection:
    """A client's connection and the service's connection for it."""

    def __init__(
        self, client: asyncio.StreamWriter, service: asyncio.StreamWriter, upwards: Direction, downwards: Direction
    ):
        self.alive = True
        self.client = client
        self.service = service
        self.upwards = upwards
        self.downwards = downwards

    async def carry(self, notify: Callable[[], None]) -> None:
        """Carry both directions until both have ended."""
        await asyncio.gather(self.upwards.carry(notify), self.downwards.carry(notify))
        self.alive = False
        notify()

    def cut(self) -> None:
        """Break both sides; bytes in flight are lost."""
        self.client.transport.abort()
        self.service.transport.abort()


class Forwarder:
    """Forwards connections; a test's thread cuts, refuses, holds or delays them."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._news = threading.Condition()
        self._connections: list[Connection] = []
        self._refusing = False
        self._refusals = 0
        self._delay_seconds = 0.0
        self._holding_next = False
        self._stop = asyncio.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._listening.wait(_WAIT_SECONDS)

    def cut(self) -> None:
        """Break all connections, on both sides."""
        self._do(self._cut)

    def refuse(self) -> None:
        """Break new connections at once."""
        self._refusals = 0
        self._refusing = True

    def accept(self) -> None:
        """Carry new connections again."""
        self._refusing = False

    def wait_for_refusals(self, count: int) -> None:
        """Wait until this many connections were refused since `refuse`."""
        self._wait(lambda: self._refusals >= count)

    def delay_answers(self, seconds: float) -> None:
        """Delay the service's bytes by `seconds`, from the next connection on."""
        self._delay_seconds = seconds

    def hold(self, answers: bool = False) -> Connection:
        """Hold the client's bytes of the one connection from now on, and with `answers` the service's."""
        self._wait(lambda: len(self._alive()) == 1)
        (connection,) = self._alive()
        self._do(connection.upwards.open.clear)
        if answers:
            self._do(connection.downwards.open.clear)
        return connection

    def hold_next(self) -> None:
        """Hold all bytes of the next connection's client."""
        self._holding_next = True

    def held_next(self, count: int) -> Connection:
        """Wait for the next connection and this many bytes of its client; return it."""
        self._wait(lambda: not self._holding_next)
        connection = self._connections[-1]
        self.wait_for_held_bytes(connection, count)
        return connection

    def wait_for_silence(self, connection: Connection) -> None:
        """Wait until the client has sent nothing for a while."""
        before = -1
        while before != connection.upwards.waiting_bytes:
            before = connection.upwards.waiting_bytes
            time.sleep(_SILENCE_SECONDS)

    def wait_for_held_bytes(self, connection: Connection, count: int) -> None:
        self._wait(lambda: connection.upwards.waiting_bytes >= count)

    def leave_client(self, connection: Connection) -> None:
        """Break the client's side only: the service does not see it before `end`."""
        self._do(connection.upwards.may_end.clear)
        self._do(connection.client.transport.abort)

    def release(self, connection: Connection) -> None:
        self._do(connection.upwards.open.set)
        self._do(connection.downwards.open.set)

    def wait_for_lost_answer(self, connection: Connection, count: int) -> None:
        """Wait until the service has sent this many bytes to the disconnected client."""
        self._wait(lambda: connection.downwards.lost_bytes >= count)

    def end(self, connection: Connection) -> None:
        """Disconnect the service's side, and wait until both sides have ended."""
        self._do(connection.upwards.may_end.set)
        self._wait(lambda: not connection.alive)

    def close(self) -> None:
        self._do(self._stop.set)
        self._thread.join(_WAIT_SECONDS)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        await self._stop.wait()
        server.close()
        for connection in self._alive():
            for event in (connection.upwards.open, connection.downwards.open, connection.upwards.may_end):
                event.set()
        self._cut()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refusing:
                raise ConnectionRefusedError
            service_reader, service_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            self._refusals += 1
            self._notify()
            return
        connection = Connection(
            writer,
            service_writer,
            upwards=Direction(reader, service_writer, 0),
            downwards=Direction(service_reader, writer, self._delay_seconds),
        )
        self._connections.append(connection)
        if self._holding_next:
            connection.upwards.open.clear()
            self._holding_next = False
        self._notify()
        with suppress(asyncio.CancelledError):  # the loop is ending
            await connection.carry(self._notify)

    def _alive(self) -> list[Connection]:
        return [connection for connection in self._connections if connection.alive]

    def _cut(self) -> None:
        for connection in self._alive():
            connection.cut()

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(done, _WAIT_SECONDS), "the forwarder waited in vain"

    def _do(self, act: Callable[[], object]) -> None:
        done = threading.Event()

        def act_and_report() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(act_and_report)
        assert done.wait(_WAIT_SECONDS)
