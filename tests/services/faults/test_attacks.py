"""Attacks on the ports of a running Quire, while another client's stream continues."""

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quire.v1 import engine_pb2, gateway_pb2, gateway_pb2_grpc, kvmanager_pb2
from services.cli.main import cli
from services.gateway.access.api_keys import make_key
from services.runtime import transport
from tests.api_keys import Keyed, bearer, write_keys
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running.neighbour import Neighbour, tokens_over_grpc
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, RunningService, start_quire
from tests.scrape import Scrape
from tests.timing import standing_still

Status = grpc.StatusCode
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SECRET_SALT = "ultramarine"
SECRET_PROMPT = "The launch code of the heron is seventeen bluebells and a teapot"

A, B, OPERATOR, EXPIRED, LEAVING, SINGLE = KEYS = [make_key() for _ in range(6)]
ENTRIES = {
    A: "tenant = 'a'",
    B: "tenant = 'b'",
    OPERATOR: "tenant = 'ops'\noperator = true",
    EXPIRED: "tenant = 'a'\nexpires = 2020-01-01T00:00:00Z",
    LEAVING: "tenant = 'leaving'",
    SINGLE: "tenant = 'single'\nmax_concurrent_requests = 1",
}


class Guarded:
    """A Quire that requires API keys, and its clients."""

    def __init__(self, running: RunningQuire, keys: Path) -> None:
        self.running = running
        self.keys = keys
        self.addresses = running.addresses
        self._clients = {key: Keyed(self.addresses["gateway"], key) for key in KEYS}

    def of(self, key: str) -> gateway_pb2_grpc.GatewayStub:
        return self._clients[key].gateway

    def generate(self, request: gateway_pb2.GenerateRequest, key: str = B) -> Answer:
        return Answer.of(self.of(key).Generate(request, timeout=CALL_SECONDS))

    def running_requests(self, tenant: str) -> float:
        shown = Scrape.of(self.running.metrics_urls["gateway"])
        return shown.values("quire_tenant_requests_running", "tenant").get(tenant, 0)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


@pytest.fixture(scope="module")
def guarded(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", ENTRIES)
    model = str(tiny_model("llama"))
    running = start_quire("--model", model, "--device-blocks", "256", "--api-keys", str(keys))
    one = Guarded(running, keys)
    yield one
    one.close()
    assert running.close() == 0
    log = "\n".join(running.lines)
    assert "API keys were loaded" in log
    assert "request ended" in log
    for secret in (*KEYS, SECRET_SALT, "Bearer", "authorization", "launch code", "heron", "bluebells"):
        assert secret not in log


@pytest.fixture(scope="module", autouse=True)
def neighbour(guarded: Guarded) -> Iterator[Neighbour]:
    one = Neighbour(lambda: tokens_over_grpc(guarded.of(B)))
    yield one
    one.close()
    assert one.faults == []
    assert one.streams > 0


@pytest.fixture(autouse=True)
def _others_continue(guarded: Guarded, neighbour: Neighbour) -> Iterator[None]:
    yield
    neighbour.wait_for_tokens()
    assert guarded.running.settled_pool(sequences=1).sequences <= 1, "a refused request holds blocks"


def secret_request(
    max_tokens: int = 4, salt: str = "", request_id: str = "", *, before: str = ""
) -> gateway_pb2.GenerateRequest:
    """Build a request whose prompt is `before` and the secret."""
    request = prompt_request(before + SECRET_PROMPT, max_tokens, salt=salt)
    request.request_id = request_id
    return request


def refusal(call: Any) -> tuple[Status, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


def until_refused(call: Any) -> Iterator[gateway_pb2.GenerateResponse]:
    with suppress(grpc.RpcError):
        yield from call


# Compression.


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_is_refused_before_it_is_expanded(guarded: Guarded, algorithm: grpc.Compression) -> None:
    """A message of a megabyte may be a gigabyte."""
    for service, method in (("gateway", "Generate"), ("engine", "GetTokenizer"), ("KV manager", "GetPool")):
        path = f"/quire.v1.{'KVManager' if service == 'KV manager' else service.title()}/{method}"
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(guarded.addresses[service], options, algorithm) as channel:
            call = channel.unary_stream(path, request_serializer=bytes, response_deserializer=bytes)
            bomb = call(bytes(32 * 1024 * 1024), timeout=CALL_SECONDS, metadata=bearer(B))
            assert refusal(bomb) == (
                Status.UNIMPLEMENTED,
                f"Compression algorithm '{algorithm.name.lower()}' is disabled.",
            )


# Keys.


def every_call(gateway: gateway_pb2_grpc.GatewayStub, metadata: Any) -> Iterator[tuple[Status, str]]:
    for method in gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods:
        request = GetMessageClass(method.input_type)()
        call = getattr(gateway, method.name)
        if method.server_streaming:
            yield refusal(call(request, timeout=10, metadata=metadata))
        else:
            yield refusal(call(request, timeout=10, metadata=metadata) for _ in "x")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ((), "a valid API key is needed"),
        ((*bearer(A), *bearer(B)), "a valid API key is needed"),
        ((("authorization-bin", f"Bearer {A}".encode()),), "a valid API key is needed"),
        (bearer(EXPIRED), "the API key has expired"),
    ],
    ids=["none", "two", "as bytes", "expired"],
)
def test_no_call_of_the_gateway_is_open_without_a_valid_key(guarded: Guarded, metadata: Any, words: str) -> None:
    refusals = set(every_call(guarded.running.gateway, metadata))
    assert {status for status, _ in refusals} == {Status.UNAUTHENTICATED}
    assert len(refusals) == 1, "the refusals of the calls differ"
    assert refusals.pop()[1].startswith(words)


def test_a_call_without_a_key_is_not_parsed(guarded: Guarded) -> None:
    call: Any = guarded.running.channel.unary_stream("/quire.v1.Gateway/Generate")
    assert refusal(call(b"\xff" * 1000, timeout=10))[0] == Status.UNAUTHENTICATED
    assert refusal(call(b"\xff" * 1000, timeout=10, metadata=bearer(A)))[0] == Status.INVALID_ARGUMENT


def test_health_and_reflection_stay_open(guarded: Guarded) -> None:
    health: Any = health_pb2_grpc.HealthStub(guarded.running.channel)
    request = health_pb2.HealthCheckRequest(service="quire.v1.Gateway")
    assert health.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(guarded.running.channel)
    listing = next(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])))
    names = [service.name for service in listing.list_services_response.service]
    assert "quire.v1.Gateway" in names


def test_only_an_operators_key_may_administer(guarded: Guarded) -> None:
    request = gateway_pb2.AdminRequest(list_pinned={})
    assert refusal(guarded.of(A).Admin(request, timeout=10) for _ in "x") == (
        Status.PERMISSION_DENIED,
        "the API key must be an operator's",
    )
    assert guarded.of(OPERATOR).Admin(request, timeout=10).pins == []


def test_a_removed_key_is_refused_at_once_and_its_running_stream_continues(guarded: Guarded) -> None:
    stream = guarded.of(LEAVING).Generate(secret_request(100), timeout=CALL_SECONDS)
    next(stream)
    seen = len(guarded.running.lines)
    new = write_keys(guarded.keys.with_name("new.toml"), {key: ENTRIES[key] for key in KEYS if key != LEAVING})
    new.replace(guarded.keys)
    guarded.running.output.wait_for(f"{len(KEYS) - 1} API keys were loaded", after=seen)
    assert refusal(guarded.of(LEAVING).Generate(secret_request(), timeout=10))[0] == Status.UNAUTHENTICATED
    assert len(Answer.of(stream).token_ids) == 100


def test_commands_take_the_api_key_from_the_environment_or_a_file(guarded: Guarded, tmp_path: Path) -> None:
    def models(**environment: str) -> tuple[int, str]:
        arguments = ["generate", "Hello", "--max-tokens", "1", "--address", guarded.addresses["gateway"]]
        done = CliRunner().invoke(cli, arguments, auto_envvar_prefix="QUIRE", env=environment)
        return done.exit_code, done.stderr

    (tmp_path / "key").write_text(A + "\n")
    assert models(QUIRE_API_KEY=A)[0] == 0
    assert models(QUIRE_API_KEY_FILE=str(tmp_path / "key"))[0] == 0
    status, message = models(QUIRE_API_KEY="nonsense")
    assert (status, "UNAUTHENTICATED" in message, "nonsense" in message) == (1, True, False)
    assert models(QUIRE_API_KEY=A, QUIRE_API_KEY_FILE="f")[0] == 2


# Tenants.


def test_no_tenant_hits_the_cached_prompt_of_another_with_any_salt(guarded: Guarded) -> None:
    def cached_tokens(salt: str, key: str) -> int:
        return guarded.generate(secret_request(salt=salt, before="Salted. "), key).started.cached_tokens

    assert cached_tokens(SECRET_SALT, A) == 0
    assert cached_tokens(SECRET_SALT, A) > 0
    for salt in (SECRET_SALT, "", "a", f"\x01a{SECRET_SALT}", f"a/{SECRET_SALT}"):
        assert cached_tokens(salt, B) == 0
    assert cached_tokens("other", A) == 0


def test_tenants_share_public_prefixes(guarded: Guarded, service: Callable[..., RunningService]) -> None:
    public = service(
        *("gateway", "--listen", "127.0.0.1:0", "--engines", guarded.addresses["engine"]),
        *("--api-keys", str(guarded.keys), "--prefixes", "public"),
    )
    public.output.wait_for("gateway is ready")
    gateway = gateway_pb2_grpc.GatewayStub(public.channel)
    cached = [
        Answer.of(gateway.Generate(secret_request(), timeout=CALL_SECONDS, metadata=bearer(key))).started.cached_tokens
        for key in (A, B)
    ]
    assert cached[0] == 0 < cached[1]


def test_only_the_tenant_of_a_pin_hits_it(guarded: Guarded) -> None:
    operator = guarded.of(OPERATOR)
    prompt = gateway_pb2.Prompt(text="A pinned prompt. " + SECRET_PROMPT)
    pin = gateway_pb2.PinPrompt(name="p", prompt=prompt, tenant="a")
    nobodys = gateway_pb2.AdminRequest(pin_prefix=gateway_pb2.PinPrompt(name="q", prompt=prompt))
    operator.Admin(gateway_pb2.AdminRequest(pin_prefix=pin), timeout=20)
    try:
        request = prompt_request(prompt.text + "!", 2)
        assert guarded.generate(request, A).started.cached_tokens > 0
        assert guarded.generate(request, B).started.cached_tokens == 0
        assert refusal(operator.Admin(nobodys, timeout=20) for _ in "x")[0] == Status.INVALID_ARGUMENT
    finally:
        operator.Admin(gateway_pb2.AdminRequest(unpin_prefix={"name": "p"}), timeout=20)


def test_explain_finds_a_request_under_its_tenant_only(guarded: Guarded) -> None:
    guarded.generate(secret_request(request_id="mine"), A)
    address = guarded.addresses["KV manager"]
    explained = CliRunner().invoke(cli, ["explain", "a/mine", "--address", address])
    assert explained.exit_code == 0, explained.output
    assert CliRunner().invoke(cli, ["explain", "mine", "--address", address]).exit_code == 1


def test_a_key_without_priorities_cannot_exceed_the_default_priority(guarded: Guarded) -> None:
    urgent, later = secret_request(), secret_request()
    urgent.priority, later.priority = -1, 1
    status, message = refusal(guarded.of(A).Generate(urgent, timeout=10))
    assert (status, message) == (
        Status.PERMISSION_DENIED,
        "priority must be at least 0 with this API key, not -1",
    )
    guarded.generate(later, A)


def test_a_tenant_at_its_limit_of_requests_is_refused_and_another_is_not(guarded: Guarded) -> None:
    with standing_still(guarded.running.children()["engine"]):
        first = guarded.of(SINGLE).Generate(secret_request(40), timeout=CALL_SECONDS)
        wait_until(lambda: guarded.running_requests("single") == 1, "the request is in flight")
        calls = [guarded.of(SINGLE).Generate(secret_request(request_id=name), timeout=10) for name in ("mine", "")]
        (status, message), _ = [refusal(call) for call in calls]
        request_ids = [dict(call.trailing_metadata())["x-request-id"] for call in calls]
    assert status == Status.RESOURCE_EXHAUSTED
    assert request_ids[0] == "mine"
    assert request_ids[1], "the gateway generates an id"
    assert message.startswith("1 sequences of tenant 'single' are in flight, its limit is 1")
    guarded.generate(secret_request(), A)
    first.cancel()

    single = guarded.of(SINGLE)
    wait_until(
        lambda: bool([*until_refused(single.Generate(secret_request(), timeout=10))]), "the tenant's place is free"
    )


# Bytes.


def test_metadata_beyond_the_limit_is_refused_and_within_it_accepted(guarded: Guarded) -> None:
    def size(count: int) -> Any:
        return (*bearer(A), ("filling", "x" * count))

    request = gateway_pb2.GetModelRequest()
    gateway = guarded.running.gateway
    assert gateway.GetModel(request, timeout=10, metadata=size(12_000)).block_size == 16
    for count in (20_000, 200_000):
        status, message = refusal(gateway.GetModel(request, timeout=10, metadata=size(count)) for _ in "x")
        assert (status, "metadata size" in message) == (Status.RESOURCE_EXHAUSTED, True)


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


DATA, HEADERS, SETTINGS, PING, CONTINUATION = 0, 1, 4, 6, 9
GREETING = PREFACE + frame(SETTINGS)
draw = random.Random(11)

GARBAGE = {
    "nothing": b"",
    "random bytes": draw.randbytes(5000),
    "zeros": bytes(5000),
    "part of a preface": PREFACE[:10],
    "only a preface": PREFACE,
    "random bytes after a preface": PREFACE + draw.randbytes(5000),
    "random bytes after a greeting": GREETING + draw.randbytes(5000),
    "random frames": GREETING + b"".join(frame(draw.randrange(16), draw.randbytes(20), stream=1) for _ in range(50)),
    "a frame header of 16 MB": GREETING + b"\xff\xff\xff" + bytes(6) + bytes(1000),
    "malformed headers": GREETING + frame(HEADERS, draw.randbytes(200), flags=5, stream=1),
    "headers without an end": GREETING
    + frame(HEADERS, b"", stream=1)
    + frame(CONTINUATION, bytes(5000), stream=1) * 20,
    "data of an unknown stream": GREETING + frame(DATA, bytes(100), stream=7),
    "thousands of pings": GREETING + frame(PING, bytes(8)) * 5000,
    "thousands of settings": GREETING + frame(SETTINGS) * 5000,
    "plain HTTP": b"GET / HTTP/1.1\r\nHost: quire\r\n\r\n",
    "HTTP with a body": b'POST /quire.v1.Gateway/Generate HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"a": 1}\n',
    "TLS": bytes.fromhex("16030100") + b"\xc8" + draw.randbytes(200),
}
PORTS = ("gateway", "engine", "KV manager")


def connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CALL_SECONDS)
    connection.connect(address.removeprefix("unix:"))
    return connection


@pytest.mark.parametrize("port", PORTS)
def test_malformed_bytes_end_no_process_and_no_other_stream(guarded: Guarded, neighbour: Neighbour, port: str) -> None:
    children = guarded.running.children()
    for garbage in GARBAGE.values():
        with connect(guarded.addresses[port]) as connection:
            try:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass  # closed before the end
    neighbour.wait_for_tokens()
    assert guarded.running.children() == children


def test_silent_connections_block_no_other(guarded: Guarded, neighbour: Neighbour) -> None:
    held = [connect(guarded.addresses[port]) for port in PORTS for _ in range(50)]
    for number, connection in enumerate(held):
        connection.sendall(PREFACE[: number % len(PREFACE)])
    neighbour.wait_for_tokens()
    guarded.generate(secret_request(), A)
    for connection in held:
        connection.close()


def settings_of(address: str) -> dict[int, int]:
    """Return the values of a server's first frame, by identifier."""
    with connect(address) as connection, connection.makefile("rb") as incoming:
        connection.sendall(GREETING)
        payload = incoming.read(int.from_bytes(incoming.read(9)[:3]))
    return {
        int.from_bytes(payload[at : at + 2]): int.from_bytes(payload[at + 2 : at + 6])
        for at in range(0, len(payload), 6)
    }


@pytest.mark.parametrize("port", PORTS)
def test_a_connection_receives_its_limits_of_streams_and_metadata(guarded: Guarded, port: str) -> None:
    settings = settings_of(guarded.addresses[port])
    assert (settings[3], settings[6]) == (transport._STREAMS_PER_CONNECTION, transport._METADATA_BYTES)


@pytest.mark.parametrize("module", [gateway_pb2, engine_pb2, kvmanager_pb2], ids=PORTS)
def test_malformed_messages_are_refused_by_every_call_of_every_port(guarded: Guarded, module: Any) -> None:
    (service,) = module.DESCRIPTOR.services_by_name.values()
    port = dict(zip((gateway_pb2, engine_pb2, kvmanager_pb2), PORTS, strict=True))[module]
    noise = random.Random(5)
    with grpc.insecure_channel(guarded.addresses[port], options=transport.channel_options()) as channel:
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            for bytes_ in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", noise.randbytes(1000), b"\x0b" * 5000):
                call: Any = channel.stream_stream(path)(iter([bytes_]), timeout=CALL_SECONDS, metadata=bearer(OPERATOR))
                status, message = refusal(call)
                assert status == Status.INVALID_ARGUMENT, (method.name, bytes_[:10], status, message)
