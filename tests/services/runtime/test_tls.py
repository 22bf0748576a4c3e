"""TLS on real connections: trust, versions, and certificates that are replaced while streams are open."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.main import cli
from services.runtime import transport
from services.runtime.health import HealthServicer
from services.runtime.service import Readiness
from services.runtime.settings import InvalidSetting
from services.runtime.tls import ClientTLS, ServerContext, ServerTLS, TLSFiles
from tests.api_keys import write_keys
from tests.certificates import Authority
from tests.engine.native_kernels import device_name
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningService
from tests.services.runtime.test_transport import serving

pytestmark = pytest.mark.anyio

SECONDS = 60
TIMEOUT = ("--timeout", str(SECONDS))
# Not the address that the engine listens on.
OTHER_ADDRESS = "10.0.0.7"
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def pairs(authority: Authority, stranger: Authority) -> dict[str, Pair | None]:
    return {
        "valid": authority.issue("a"),
        "none": None,
        "another authority's": stranger.issue("s"),
        "expired": authority.issue("expired", days=-1),
    }


def files(pair: Pair | None, ca: Path | None = None) -> TLSFiles:
    certificate, key = map(str, pair) if pair else ("", "")
    return TLSFiles(certificate, key, str(ca or ""))


@dataclass
class Listening:
    """A running server of the health service."""

    address: str
    readiness: Readiness


@asynccontextmanager
async def listening(tls: ServerTLS | None) -> AsyncIterator[Listening]:
    server, readiness = transport.server(transport.CLIENT_MESSAGE_BYTES), Readiness()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer("x", readiness), server)
    async with serving(server, tls) as address:
        yield Listening(address, readiness)


async def check(address: str, tls: ClientTLS | None) -> str:
    """Call over a new connection; return the health, or the name of the error's status."""
    async with transport.channel(address, tls=tls) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def result_of(server: ServerTLS | None, client: ClientTLS | None) -> str:
    async def call() -> str:
        async with listening(server) as health:
            return await check(health.address, client)

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("server", "client_has_tls"),
    [("valid", False), ("none", True), ("another authority's", True), ("expired", True)],
)
def test_a_connection_without_tls_or_trust_fails(
    authority: Authority, pairs: dict[str, Pair | None], server: str, client_has_tls: bool
) -> None:
    serving = ServerTLS(files(pairs[server])) if pairs[server] else None
    calling = ClientTLS(files(None, authority.ca)) if client_has_tls else None
    assert result_of(serving, calling) == "UNAVAILABLE"


def test_the_certificates_name_must_be_the_expected_one(authority: Authority) -> None:
    server = ServerTLS(files(authority.issue("named", host="engine")))
    assert result_of(server, ClientTLS(files(None, authority.ca), "engine")) == "SERVING"
    assert result_of(server, ClientTLS(files(None, authority.ca), "gateway")) == "UNAVAILABLE"


@pytest.mark.parametrize("client", ["valid", "none", "another authority's", "expired"])
def test_with_a_client_ca_only_its_certificates_are_accepted(
    authority: Authority, pairs: dict[str, Pair | None], client: str
) -> None:
    server = ServerTLS(files(pairs["valid"], authority.ca))
    result = result_of(server, ClientTLS(files(pairs[client], authority.ca)))
    assert result == ("SERVING" if client == "valid" else "UNAVAILABLE")


@contextmanager
def handshake(address: str, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    """Connect and shake hands as a client of HTTP/2."""
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as encrypted,
    ):
        yield encrypted


def version_spoken(address: str, version: ssl.TLSVersion) -> str:
    """Shake hands in one version of TLS only; return the version, or the name of the error."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")  # otherwise this side would not offer the old ones
    context.minimum_version = context.maximum_version = version
    try:
        with handshake(address, context) as encrypted:
            return encrypted.version() or ""
    except (ssl.SSLError, ConnectionError) as error:
        return type(error).__name__


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_tls_below_1_2_is_refused(authority: Authority) -> None:
    versions = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    async with listening(ServerTLS(files(authority.issue("a")))) as health:
        spoken = [await asyncio.to_thread(version_spoken, health.address, version) for version in versions]
    assert spoken[2:] == ["TLSv1.2", "TLSv1.3"]
    assert not {"", "SSLv3", "TLSv1", "TLSv1.1"} & set(spoken[:2]), "the handshake fails"


def name_shown(address: str, ca: Path) -> str:
    """Return the name in the server's certificate, from a new connection."""
    with handshake(address, ssl.create_default_context(cafile=str(ca))) as encrypted:
        subject: Any = encrypted.getpeercert()["subject"]  # type: ignore[index]
        return str(subject[0][0][1])


def replace(old: Pair, new: Pair) -> None:
    """Replace a certificate and its key, as `mv` does."""
    for path, other in zip(reversed(old), reversed(new), strict=True):
        os.link(other, f"{other}.link")
        Path(f"{other}.link").replace(path)


async def test_new_connections_use_a_replaced_certificate_while_old_streams_continue(authority: Authority) -> None:
    old = authority.issue("old")
    async with (
        listening(ServerTLS(files(old))) as health,
        transport.channel(health.address, tls=ClientTLS(files(None, authority.ca))) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="x"))
        await watch.read()
        assert await asyncio.to_thread(name_shown, health.address, authority.ca) == "old"
        replace(old, authority.issue("new"))
        assert await asyncio.to_thread(name_shown, health.address, authority.ca) == "new"
        health.readiness.set(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_file_that_becomes_invalid_is_ignored_and_logged(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.issue("kept")
    async with listening(ServerTLS(files(pair))) as health:
        pair[1].write_text("nonsense")
        assert await asyncio.to_thread(name_shown, health.address, authority.ca) == "kept"
    assert "TLS: keeping the previous certificates: key must have a private key in PEM form" in caplog.text


@pytest.mark.parametrize("side", ["server", "client"])
async def test_new_connections_use_the_current_authorities(
    authority: Authority, stranger: Authority, tmp_path: Path, side: str
) -> None:
    """The server loses the client's authority, or the client gains the server's."""
    ca = tmp_path / "ca.pem"
    if side == "server":
        ca.write_bytes(stranger.ca.read_bytes() + authority.ca.read_bytes())
        server = ServerTLS(files(authority.issue("a"), ca))
        client = ClientTLS(files(stranger.issue("client"), authority.ca))
    else:
        ca.write_bytes(stranger.ca.read_bytes())
        server, client = ServerTLS(files(authority.issue("a"))), ClientTLS(files(None, ca))

    async with listening(server) as health:
        before = await check(health.address, client)
        ca.write_bytes(authority.ca.read_bytes())
        after = await check(health.address, client)
    assert (before, after) == (("SERVING", "UNAVAILABLE") if side == "server" else ("UNAVAILABLE", "SERVING"))


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda pair, _other: pair[0].unlink(), "certificate cannot be read: .*: No such file or directory"),
        (lambda pair, _other: pair[0].write_text("x"), "certificate must have certificates in PEM form, not .*spoilt"),
        (lambda pair, _other: pair[1].write_text(""), "key must have a private key in PEM form, without a password"),
        (lambda pair, other: pair[1].write_bytes(other[1].read_bytes()), "key must be the private key of .*spoilt"),
    ],
    ids=["no certificate", "not a certificate", "no key", "another's key"],
)
def test_invalid_files_are_refused_at_the_start_by_name(
    authority: Authority, spoil: Callable[[Pair, Pair], Any], fault: str
) -> None:
    pair = authority.issue("spoilt")
    spoil(pair, authority.issue("other"))
    with pytest.raises(InvalidSetting, match=f"^{fault}"):
        ServerTLS(files(pair))


async def test_the_ssl_context_of_the_http_front_is_reloaded(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.runtime.tls._POLL_SECONDS", 0.01)
    pair = authority.issue("front")
    kept = ServerContext(files(pair))
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=kept.context)
    reloading = asyncio.create_task(kept.reload_on_change())
    address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        assert await asyncio.to_thread(name_shown, address, authority.ca) == "front"
        replace(pair, authority.issue("behind"))
        async with asyncio.timeout(SECONDS):
            while await asyncio.to_thread(name_shown, address, authority.ca) != "behind":
                await asyncio.sleep(0.01)
    finally:
        reloading.cancel()
        server.close()


# Running services.


@dataclass
class Encrypted:
    """Three services with mutual TLS on every link; the engine is found by name."""

    gateway: RunningService
    engine: RunningService
    kvmanager: RunningService
    ca: str
    certificate: str
    key: str
    api_key: str

    @property
    def https_url(self) -> str:
        return self.gateway.output.wait_for("gateway listens for HTTP at ").split(" at ")[1]

    def command(self, *arguments: str, client: bool = True, **environment: str) -> Result:
        """Run a `quire` command that trusts the authority, by default with a client certificate."""
        own = ("--certificate", self.certificate, "--private-key", self.key) if client else ()
        return CliRunner().invoke(
            cli, [*arguments, "--ca", self.ca, *own], auto_envvar_prefix="QUIRE", env=dict(environment)
        )


@pytest.fixture(scope="module")
def encrypted(
    service: Callable[..., RunningService],
    tiny_model: Callable[[str], Path],
    authority: Authority,
    tmp_path_factory: pytest.TempPathFactory,
) -> Encrypted:
    certificate, key = map(str, authority.issue("quire"))
    ca, api_key = str(authority.ca), "k" * 32

    def listen(pair: tuple[str, str]) -> tuple[str, ...]:
        return ("--listen", "127.0.0.1:0", "--tls-certificate", pair[0], "--tls-key", pair[1], "--tls-client-ca", ca)

    link = ("--link-ca", ca, "--link-certificate", certificate, "--link-key", key)
    kvmanager = service("kvmanager", *listen((certificate, key)))
    other_host = map(str, authority.issue("engine", address=OTHER_ADDRESS))
    engine = service(
        *("engine", *listen(tuple(other_host)), "--kvmanager", kvmanager.address, "--link-ca", ca),
        *("--model", str(tiny_model("llama")), "--device-blocks", "64"),
    )
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", {api_key: "tenant = 'acme'\noperator = true"})
    named = f"dns:localhost:{engine.address.rsplit(':', 1)[1]}"
    gateway = service(
        *("gateway", *listen((certificate, key)), "--engines", named, "--kvmanager", kvmanager.address, *link),
        *("--api-keys", str(keys), "--http-listen", "127.0.0.1:0"),
    )
    gateway.output.wait_for("gateway is ready")
    return Encrypted(gateway, engine, kvmanager, ca, certificate, key, api_key)


def test_a_request_passes_mutual_tls_on_every_link(encrypted: Encrypted) -> None:
    at, key = ("--address", encrypted.gateway.address), {"QUIRE_API_KEY": encrypted.api_key}
    done = encrypted.command("generate", "The quick brown fox", *at, "--max-tokens", "5", **key)
    assert (done.exit_code, "5 generated" in done.stderr) == (0, True), done.output
    assert encrypted.command("pins", *at, **key).exit_code == 0
    assert encrypted.command("health", encrypted.gateway.address, *TIMEOUT).stdout == "SERVING\n"
    explained = encrypted.command("explain", "acme/nobody", "--address", encrypted.kvmanager.address, *TIMEOUT)
    assert "NOT_FOUND" in explained.stderr


def test_an_engine_found_by_name_needs_that_name_in_its_certificate_not_its_address(encrypted: Encrypted) -> None:
    command = ("health", encrypted.engine.address, "--service", "quire.v1.Engine", *TIMEOUT)
    assert "UNAVAILABLE" in encrypted.command(*command).stderr
    healthy = encrypted.command(*command, "--server-name", "localhost").stdout
    assert healthy == f"SERVING\ntiny-llama: float32 on {device_name()}\n"


@pytest.mark.parametrize("which", ["gateway", "kvmanager"])
def test_no_port_answers_without_a_certificate_or_without_tls(encrypted: Encrypted, which: str) -> None:
    address = getattr(encrypted, which).address
    name = "quire.v1.Gateway" if which == "gateway" else "quire.v1.KVManager"
    command = ["health", address, "--service", name, *TIMEOUT]
    for done in (encrypted.command(*command, client=False), CliRunner().invoke(cli, command)):
        assert (done.exit_code, "UNAVAILABLE" in done.stderr) == (1, True)


def test_https_accepts_the_same_certificates_as_grpc(encrypted: Encrypted) -> None:
    url = encrypted.https_url
    trusting = ssl.create_default_context(cafile=encrypted.ca)
    for refused in (url, url.replace("https", "http")):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{refused}/health", verify=trusting, timeout=CALL_SECONDS)
    trusting.load_cert_chain(encrypted.certificate, encrypted.key)
    assert httpx.get(f"{url}/health", verify=trusting, timeout=CALL_SECONDS).status_code == 200


@pytest.mark.parametrize("how", ["--address", "--url"])
def test_the_load_generator_uses_mutual_tls(encrypted: Encrypted, how: str) -> None:
    at = (how, encrypted.gateway.address if how == "--address" else encrypted.https_url)
    load = ["--requests", "2", "--warmup", "0", "--concurrency", "2", "--vocabulary", "300"]
    load += ["--input", "20", "--output", "3"]
    done = encrypted.command("bench", "serve", *at, *load, QUIRE_API_KEY=encrypted.api_key)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "2 requests completed, 0 failed" in " ".join(done.stdout.split())
    without = encrypted.command("bench", "serve", *at, *load, client=False, QUIRE_API_KEY=encrypted.api_key)
    assert (without.exit_code, without.stderr.startswith("Error: ")) == (1, True)


def test_streams_survive_the_replacement_of_all_certificates(encrypted: Encrypted, authority: Authority) -> None:
    pem = [Path(path).read_bytes() for path in (encrypted.ca, encrypted.key, encrypted.certificate)]
    credentials = grpc.ssl_channel_credentials(*pem)
    with grpc.secure_channel(encrypted.gateway.address, credentials) as channel:
        call: Any = channel.unary_stream("/quire.v1.Gateway/Generate")
        metadata = (("authorization", f"Bearer {encrypted.api_key}"),)
        request = prompt_request("Once upon a time", 200).SerializeToString()
        stream = call(request, timeout=CALL_SECONDS, metadata=metadata)
        next(stream)
        authority.issue("quire")
        authority.issue("engine", address=OTHER_ADDRESS)
        again = encrypted.command("health", encrypted.gateway.address, *TIMEOUT)
        assert again.stdout == "SERVING\n", again.output
        rest = list(stream)
    assert len(rest) > 1
    assert encrypted.gateway.process.poll() is None
