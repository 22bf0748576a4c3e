"""`quire certificates`: real servers and clients accept its files, and it overwrites none."""

import stat
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from services.cli.commands.authority import now, open_authority
from services.cli.main import cli
from services.runtime.settings import InvalidSetting
from services.runtime.tls import ClientTLS, ServerTLS, TLSFiles
from tests.services.runtime.test_tls import result_of

SERVICES = ["engine", "gateway", "kvmanager"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["certificates", *arguments])


def made(folder: Path, *arguments: str) -> Path:
    done = run("create", str(folder), *arguments)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("certificates"), "--host", "engine=10.0.0.7", "--host", "engine=e.example")


def files(folder: Path, service: str) -> TLSFiles:
    return TLSFiles(*(str(folder / service / f"{name}.pem") for name in ("certificate", "key", "ca")))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("client", SERVICES)
def test_any_two_services_connect_with_mutual_tls(folder: Path, service: str, client: str) -> None:
    server = ServerTLS(files(folder, service))
    assert result_of(server, ClientTLS(files(folder, client))) == "SERVING"
    assert result_of(server, ClientTLS(files(folder, client), service)) == "SERVING"


@pytest.mark.parametrize(
    ("name", "result"),
    [("engine", "SERVING"), ("localhost", "SERVING"), ("e.example", "SERVING"), ("gateway", "UNAVAILABLE")],
)
def test_a_certificate_has_only_the_names_of_its_service(folder: Path, name: str, result: str) -> None:
    assert result_of(ServerTLS(files(folder, "engine")), ClientTLS(files(folder, "gateway"), name)) == result


def test_certificates_of_another_authority_are_refused(folder: Path, tmp_path: Path) -> None:
    stranger = files(made(tmp_path), "gateway")
    trusting = TLSFiles(stranger.certificate, stranger.key, files(folder, "gateway").ca)
    assert result_of(ServerTLS(files(folder, "engine")), ClientTLS(trusting)) == "UNAVAILABLE"


def test_the_server_name_is_that_of_the_address_unless_one_is_set(folder: Path) -> None:
    server, client = ServerTLS(files(folder, "engine")), files(folder, "gateway")
    assert result_of(server, ClientTLS(client).with_server_name("engine")) == "SERVING"
    assert result_of(server, ClientTLS(client).with_server_name("gateway")) == "UNAVAILABLE"
    assert result_of(server, ClientTLS(client).with_server_name("")) == "SERVING"
    assert result_of(server, ClientTLS(client, "engine").with_server_name("gateway")) == "SERVING"


def test_only_the_owner_reads_keys(folder: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode): path.name for path in folder.rglob("*.pem")}
    assert modes[0o600] == "key.pem"
    assert {path.name for path in folder.rglob("*.pem") if path.stat().st_mode & 0o077} == {"ca.pem", "certificate.pem"}


def test_existing_certificates_are_not_overwritten(tmp_path: Path) -> None:
    before = contents(made(tmp_path))
    done = run("create", str(tmp_path))
    assert (done.exit_code, "exists already and is not overwritten" in done.stderr) == (1, True)
    assert contents(tmp_path) == before


def test_existing_certificates_are_kept_missing_ones_created_and_expiring_ones_renewed(tmp_path: Path) -> None:
    made(tmp_path, "--service", "engine", "--service", "gateway", "--days", "100")
    before = contents(tmp_path)
    assert run("create", str(tmp_path), "--keep").stdout.startswith("kvmanager: until ")
    assert {path: contents(tmp_path)[path] for path in before} == before
    assert run("create", str(tmp_path), "--keep").stdout == "nothing to do\n"
    authority = open_authority(tmp_path)
    authority.issue("engine", ["e.example"], days=29, now=now())
    assert run("create", str(tmp_path), "--keep").stdout.startswith("engine: until ")
    assert authority.ends("engine") > now() + timedelta(days=300)
    client = ClientTLS(files(tmp_path, "gateway"), "e.example")
    assert result_of(ServerTLS(files(tmp_path, "engine")), client) == "SERVING"


def test_a_renewed_certificate_has_the_same_names_and_is_trusted_by_running_services(tmp_path: Path) -> None:
    made(tmp_path, "--host", "engine=e.example")
    server, client = ServerTLS(files(tmp_path, "engine")), ClientTLS(files(tmp_path, "gateway"), "e.example")
    before = contents(tmp_path)
    assert run("renew", str(tmp_path)).stdout == "nothing to do\n"
    assert len(run("renew", str(tmp_path), "--all", "--days", "2").stdout.splitlines()) == 3
    changed = {path.name for path, content in contents(tmp_path).items() if before[path] != content}
    assert changed == {"certificate.pem", "key.pem"}
    assert result_of(server, client) == "SERVING"


def test_a_certificate_lasts_no_longer_than_its_authority(tmp_path: Path) -> None:
    made(tmp_path, "--days", "36500")
    authority = open_authority(tmp_path)
    assert authority.ends("engine") < now() + timedelta(days=3651)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--service", "../x"), "service is '../x', it must be lowercase letters"),
        (("--service", "authority"), "service is 'authority'"),
        (("--host", "engine"), "host is 'engine', it must be SERVICE=HOST"),
        (("--host", "other=e"), "host is 'other=e', it must be SERVICE=HOST"),
        (("--host", "engine=a..b"), "host is 'a..b', it must be a name or an address"),
        (("--host", "engine=a b"), "host is 'a b', it must be a name or an address"),
        (("--host", "engine=-a"), "host is '-a', it must be a name or an address"),
        (("--host", "engine=a/b"), "host is 'a/b', it must be a name or an address"),
    ],
)
def test_an_invalid_certificate_request_is_refused_and_writes_no_file(
    tmp_path: Path, arguments: tuple[str, ...], fault: str
) -> None:
    done = run("create", str(tmp_path / "new"), *arguments)
    assert (done.exit_code, fault in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "new").exists()


def test_without_an_authority_nothing_is_renewed(tmp_path: Path) -> None:
    done = run("renew", str(tmp_path))
    assert (done.exit_code, "key.pem cannot be read" in done.stderr) == (1, True)
    (tmp_path / "authority").mkdir()
    (tmp_path / "authority" / "key.pem").write_text("no key")
    with pytest.raises(InvalidSetting, match="cannot be read"):
        open_authority(tmp_path)
