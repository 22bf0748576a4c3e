"""Files that people name are read up to a bound, whatever they are: /dev/zero never ends."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import click.testing
import pytest

from services.cli.batch import input_file
from services.cli.batch.plan import InvalidBatch
from services.cli.main import cli
from services.engine.events.zeromq.curve import read_keys
from services.gateway import pinned_prompts
from services.gateway.access import authentication
from services.runtime.bounded_file import read_text
from services.runtime.settings import InvalidSetting

ENDLESS = "/dev/zero"


def test_a_file_of_the_bound_is_read_and_a_longer_one_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("é" * 50)
    assert read_text(path, 100) == "é" * 50
    with pytest.raises(OSError, match=f"it has more than 99 bytes: '{path}'"):
        read_text(path, 99)


@pytest.mark.parametrize(
    "read",
    [pinned_prompts.read, authentication.read, partial(read_keys, "kv_events_curve_clients")],
    ids=["pinned prompts", "API keys", "curve keys"],
)
def test_a_file_of_a_setting_is_read_up_to_a_bound(read: Callable[[str], object]) -> None:
    with pytest.raises(InvalidSetting, match=r"cannot (be )?read.*it has more than \d+ bytes"):
        read(ENDLESS)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("generate", "x", "--api-key-file"), "--api-key-file"),
        (("generate", "x", "--json-schema"), "--json-schema"),
        (("pin", "a", "--file"), "--file"),
        (("key", "curve", "--show"), ENDLESS),
    ],
)
def test_a_file_of_a_command_is_read_up_to_a_bound(arguments: tuple[str, ...], name: str) -> None:
    done = click.testing.CliRunner().invoke(cli, [*arguments, ENDLESS])
    assert done.exit_code not in (0, None)
    assert isinstance(done.exception, SystemExit), done.exception
    assert name in done.stderr
    assert "more than" in done.stderr or "at most" in done.stderr


def test_a_device_of_requests_is_copied_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "_MOST_BYTES", 1 << 22)
    with (
        pytest.raises(InvalidBatch, match=f"{ENDLESS} has more than 4194304 bytes"),
        input_file.input_file(Path(ENDLESS)),
    ):
        pass
