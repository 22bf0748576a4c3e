"""The options of servers and channels are in effect, because gRPC silently ignores a misspelt one."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import engine_pb2, kvmanager_pb2
from services.runtime import transport
from services.runtime.health import HealthServicer
from services.runtime.service import Readiness
from services.runtime.tls import ServerTLS
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningQuire, RunningService, launch

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# gRPC's own clients ping at most once a second, and the fourth early ping ends a connection.
OBSERVED_SECONDS = 8
# Shorter than gRPC's own timeouts.
LONG_SECONDS = 60


def quiet_server(fastest_ping_seconds: int, monkeypatch: pytest.MonkeyPatch) -> grpc.aio.Server:
    """Make a server with a health that never changes."""
    monkeypatch.setattr(transport, "_FASTEST_CLIENT_PING_SECONDS", fastest_ping_seconds)
    server = transport.server(transport.CLIENT_MESSAGE_BYTES)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer("quiet", Readiness()), server)
    return server


@asynccontextmanager
async def serving(server: grpc.aio.Server, tls: ServerTLS | None = None) -> AsyncIterator[str]:
    """Start a server, and yield its address."""
    address = transport.bind(server, "127.0.0.1:0", tls)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=0)


def quiet_server_at(address: str) -> grpc.aio.Server:
    """Make a server with a health, bound to a Unix socket."""
    server = transport.server(MIB)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer("quiet", Readiness()), server)
    transport.bind(server, address)
    return server


async def answers(address: str) -> bool:
    """Return True if a server answers at an address."""
    async with transport.channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="")
        return bool(await health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_SECONDS))


async def end_of_idle_stream(server: grpc.aio.Server, ping_milliseconds: int, seconds: float) -> str | None:
    """Ping on an idle stream; return the server's reason to end it, None if it stays open."""
    options = dict(transport.channel_options()) | {"grpc.keepalive_time_ms": ping_milliseconds}
    async with (
        serving(server) as address,
        grpc.aio.insecure_channel(address, options=list(options.items())) as channel,
    ):
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="quiet"))
        await call.read()
        try:
            await asyncio.wait_for(call.read(), seconds)
        except TimeoutError:
            return None
        except grpc.aio.AioRpcError as error:
            return error.details()
        finally:
            call.cancel()
    raise AssertionError("a health that never changes changed")


async def test_a_client_that_pings_too_often_is_disconnected_and_one_within_bounds_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lenient, strict = quiet_server(1, monkeypatch), quiet_server(5, monkeypatch)
    reasons = await asyncio.gather(
        end_of_idle_stream(lenient, 1300, OBSERVED_SECONDS), end_of_idle_stream(strict, 1000, LONG_SECONDS)
    )
    assert reasons == [None, "Too many pings"]


def test_clients_may_ping_every_5_seconds_and_quires_own_channels_stay_within_that() -> None:
    own = dict(transport.channel_options())
    assert transport._FASTEST_CLIENT_PING_SECONDS == 5
    assert own["grpc.keepalive_time_ms"] > 5000
    assert own["grpc.keepalive_permit_without_calls"] == 1


async def test_two_servers_do_not_share_a_port() -> None:
    second = transport.server(MIB)
    async with serving(transport.server(MIB)) as address:
        with pytest.raises(transport.AddressUnavailable, match=f"{address}: Address already in use"):
            transport.bind(second, address)
    await second.stop(grace=0)


async def test_two_servers_do_not_share_a_unix_socket(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/x.sock"
    async with serving(quiet_server_at(address)):
        second = transport.server(MIB)
        assert transport.listen_fault(address) == "Address already in use"
        with pytest.raises(transport.AddressUnavailable, match=f"{address}: Address already in use"):
            transport.bind(second, address)
        await second.stop(grace=0)
        assert await answers(address), "the first server is still reachable"
    assert transport.listen_fault(address) == "", "the socket of a stopped server may be replaced"


async def test_a_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    inode = left.stat().st_ino
    async with serving(quiet_server_at(f"unix:{left}")):
        assert left.stat().st_ino != inode
        assert await answers(f"unix:{left}")
    assert [one.name for one in tmp_path.iterdir() if one != left] == []


async def test_a_file_in_the_place_of_a_socket_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "x.sock"
    file.write_text("notes")
    with pytest.raises(transport.AddressUnavailable, match="is not a socket"):
        transport.bind(transport.server(MIB), f"unix:{file}")
    assert file.read_text() == "notes"


def test_a_server_that_stops_removes_only_its_own_socket(
    service: Callable[..., RunningService], tmp_path: Path
) -> None:
    path = tmp_path / "kv.sock"
    first = service("kvmanager", "--listen", f"unix:{path}", "--map-listen", "")
    with launch("kvmanager", "--listen", f"unix:{path}", "--map-listen", "") as second:
        assert second.wait(CALL_SECONDS) == 1, "the address is in use"
    path.rename(tmp_path / "moved.sock")
    third = service("kvmanager", "--listen", f"unix:{path}", "--map-listen", "")
    inode = path.stat().st_ino
    assert first.close() == 0
    assert path.stat().st_ino == inode
    assert third.close() == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "the address must be host:port or unix:/path"),
        ("unix:/no/such/folder/x.sock", "No such file or directory"),
        ("256.0.0.1:0", "Name or service not known"),
        ("127.0.0.1:70000", "the port must be between 0 and 65535, not 70000"),
    ],
)
async def test_an_impossible_address_is_refused_with_the_reason(address: str, reason: str) -> None:
    with pytest.raises(transport.AddressUnavailable, match=f"cannot listen on {address}: {reason}"):
        transport.bind(transport.server(MIB), address)


async def is_closed(address: str, greeting: bytes) -> bool:
    """Return True if the server closes a connection with only these bytes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(greeting)
    try:
        async with asyncio.timeout(LONG_SECONDS):
            with suppress(ConnectionResetError):
                while await reader.read(1024):
                    pass
    except TimeoutError:
        return False
    finally:
        writer.close()
    return True


async def test_a_connection_without_a_handshake_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_HANDSHAKE_SECONDS", 1)
    async with serving(transport.server(MIB)) as address:
        closed = await asyncio.gather(*(is_closed(address, greeting) for greeting in (b"", PREFACE[:7], PREFACE)))
    assert closed == [True] * 3


async def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_CONNECTIONS", 3)
    admitted, writers = [], []
    async with serving(transport.server(MIB)) as address:
        host, _, port = address.rpartition(":")
        for _ in range(5):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(PREFACE + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            try:
                admitted.append(bool(await reader.read(9)))
            except ConnectionResetError:  # closed before all was read
                admitted.append(False)
            writers.append(writer)
        for writer in writers:
            writer.close()
    assert admitted == [True, True, True, False, False]


# Links between services accept 64 MiB; the gateway's limit is in test_bad_input.


def register(mib: float) -> list[kvmanager_pb2.PoolRequest]:
    message = kvmanager_pb2.Register(
        engine_id="large", incarnation=1, model_fingerprint="x" * int(mib * MIB), block_size=1, device_blocks=1
    )
    return [
        kvmanager_pb2.PoolRequest(register=message),
        kvmanager_pb2.PoolRequest(report=kvmanager_pb2.ReportPage(last=True)),
    ]


def test_the_kv_manager_accepts_messages_of_5_mib(tiny_quire: RunningQuire) -> None:
    responses = tiny_quire.kvmanager.Attach(iter(register(5)), timeout=CALL_SECONDS)
    with pytest.raises(grpc.RpcError, match="register must have at most 4096 bytes, not 5242903"):
        next(responses)  # the message was read


def submission(mib: float) -> list[engine_pb2.ServeRequest]:
    return [engine_pb2.ServeRequest(submission=engine_pb2.Submission(request_id="large", salt=b"x" * int(mib * MIB)))]


def test_the_engine_accepts_messages_of_5_mib(tiny_quire: RunningQuire) -> None:
    answered = threading.Event()

    def requests() -> Iterator[engine_pb2.ServeRequest]:
        yield from submission(5)
        answered.wait(CALL_SECONDS)  # the engine ends a half-closed link before it answers

    try:
        refusals = (response.step.refused for response in tiny_quire.engine.Serve(requests(), timeout=CALL_SECONDS))
        assert next(refused for refused in refusals if refused)[0].field == "salt"  # the message was read
    finally:
        answered.set()


@pytest.mark.parametrize("service", ["kvmanager", "engine"])
def test_links_reject_messages_above_64_mib(tiny_quire: RunningQuire, service: str) -> None:
    unbounded = [("grpc.max_send_message_length", -1)]
    address = tiny_quire.addresses["KV manager" if service == "kvmanager" else "engine"]
    method = "/quire.v1.KVManager/Attach" if service == "kvmanager" else "/quire.v1.Engine/Serve"
    requests = register(64.1) if service == "kvmanager" else submission(64.1)
    with grpc.insecure_channel(address, options=unbounded) as channel:
        call = channel.stream_stream(method)(iter([requests[0].SerializeToString()]), timeout=CALL_SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_prompt_of_a_million_tokens_reaches_the_engine(tiny_quire: RunningQuire) -> None:
    request = prompt_request("")
    request.prompt.token_ids.ids.extend([300] * (1024 * 1024))
    with pytest.raises(grpc.RpcError) as caught:
        tiny_quire.generate(request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(1024 * 1024) in caught.value.details()
