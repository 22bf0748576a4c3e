"""`quire key create`, and the options of commands for keys and certificates."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from services.cli.main import cli
from services.gateway.access.api_keys import TenantLimits, parse
from services.gateway.access.callers import Caller
from services.runtime.errors import Unauthenticated

NEW_YEAR = 4070908800  # 2099-01-01T00:00:00Z


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, arguments, auto_envvar_prefix="QUIRE", env=environment)


def create(*arguments: str) -> tuple[str, str]:
    """Return the new key and its entry."""
    done = run("key", "create", *arguments)
    assert done.exit_code == 0, done.output
    return done.stderr.split()[-1], done.stdout


def test_the_key_is_shown_once_and_its_entry_holds_only_a_hash() -> None:
    key, entry = create("--tenant", "acme")
    assert len(key) > 40
    assert key not in entry
    assert parse(entry, "f").caller(f"Bearer {key}", 0) == Caller("acme", operator=False, best_priority=0)


@pytest.mark.parametrize("expires", ["2099-01-01", "2099-01-01T00:00:00Z", "2099-01-01T02:00:00+02:00"])
def test_every_option_is_in_the_entry_and_entries_can_be_appended(expires: str) -> None:
    limits = ("--tokens-per-minute", "1000", "--max-concurrent-requests", "2")
    options = ("--expires", expires, "--operator", "--best-priority", "-5")
    first = create("--tenant", "acme", *options, *limits)
    second = create("--tenant", "acme", *limits)
    keys = parse(first[1] + second[1], "f")
    assert keys.limits == {"acme": TenantLimits(2, 1000)}
    assert keys.caller(f"Bearer {first[0]}", NEW_YEAR - 1) == Caller("acme", operator=True, best_priority=-5)
    with pytest.raises(Unauthenticated):
        keys.caller(f"Bearer {first[0]}", NEW_YEAR)
    assert first[0] != second[0]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--tenant", "a/b"), "--tenant must be 1 to 64 letters, digits, dots, dashes and underscores, not 'a/b'"),
        (("--expires", "2020-01-01"), "'--expires': must be in the future, not '2020-01-01'"),
        (("--expires", "soon"), "must be a time such as 2027-01-01 or 2027-01-01T00:00:00Z, not 'soon'"),
    ],
)
def test_a_key_that_no_gateway_would_accept_is_refused(arguments: tuple[str, ...], fault: str) -> None:
    done = run("key", "create", "--tenant", "acme", *arguments)
    assert (done.exit_code, fault in " ".join(done.stderr.split()), done.stdout) == (2, True, "")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--certificate", "c"), "--certificate needs --private-key"),
        (("--private-key", "k"), "--private-key needs --certificate"),
        (("--certificate", "c", "--private-key", "k"), "--certificate needs --ca"),
        (("--server-name", "n"), "--server-name needs --ca"),
        (("--ca", "/no/file"), "--ca cannot be read: '/no/file': No such file or directory"),
        (("--api-key", "a", "--api-key-file", "f"), "give either --api-key or --api-key-file"),
        (("--api-key-file", "/no/file"), "--api-key-file cannot be read"),
        (("--api-key", "a\nb"), "the API key must be printable ASCII"),
        (("--model", "a\udcff"), "--model must be UTF-8 text: its character 2 is not"),
        (("--timeout", "nan"), "'--timeout': must be a number above 0 and at most 315360000, not nan"),
    ],
)
def test_incompatible_options_are_refused(arguments: tuple[str, ...], fault: str) -> None:
    done = run("pins", "--timeout", "1", *arguments)
    assert done.exit_code == 2
    assert fault in " ".join(done.stderr.split())


def test_the_key_is_read_from_a_file_named_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff")
    done = run("pins", "--timeout", "1", QUIRE_API_KEY_FILE=str(tmp_path / "key"))
    assert (done.exit_code, "--api-key-file cannot be read" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("pin", "x", "-"), "standard input must be UTF-8 text: invalid start byte at byte 0"),
        (("pin", "x", "--file", "FILE"), "--file must be UTF-8 text: invalid start byte at byte 0"),
        (("pin", "x", "a", "--file", "FILE"), "give one of TEXT and --file, not both"),
        (("generate", "-"), "standard input must be UTF-8 text: invalid start byte at byte 0"),
        (("generate", "x", "--json-schema", "FILE"), "--json-schema must be UTF-8 text: invalid start byte at byte 0"),
    ],
)
def test_bytes_that_are_not_text_are_refused_by_name(arguments: tuple[str, ...], fault: str, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    given = [str(tmp_path / "binary") if one == "FILE" else one for one in arguments]
    done = CliRunner().invoke(cli, [*given, "--address", "127.0.0.1:9"], input=b"\xff\xfe")
    assert (done.exit_code, fault in " ".join(done.stderr.split())) == (2, True), done.stderr
