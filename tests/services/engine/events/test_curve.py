"""Keys of KV events: files, who is admitted, and what is refused without them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.engine.events.zeromq.curve import AllowedClients, CurveKeys
from services.engine.events.zeromq.publisher import EventPublisher
from services.engine.settings import EngineSettings
from services.runtime.settings import InvalidSetting
from tests.services.engine.events.publication import ANY, listening, published, settle, until


def file_of(folder: Path, name: str, *lines: bytes) -> str:
    path = folder / name
    path.write_bytes(b"\n".join((*lines, b"")))
    return str(path)


SERVER, CLIENT, STRANGER = (CurveKeys.new() for _ in range(3))


def settings(folder: Path) -> dict[str, str]:
    return {
        "kv_events_curve_key": file_of(folder, "server", SERVER.secret),
        "kv_events_curve_clients": file_of(folder, "clients", b"# routers", CLIENT.public, b""),
    }


@pytest.mark.anyio
async def test_an_allowed_client_follows_and_a_stranger_does_not(tmp_path: Path) -> None:
    async with published(**settings(tmp_path)) as one:
        one.keys.grow(5)
        allowed = one.publication._replace(keys=CLIENT, server=SERVER.public)
        for refused in (allowed._replace(keys=STRANGER), one.publication):
            before = one.publisher.stats.refused["replay"]
            async with listening(refused) as listener:
                await until(lambda: one.publisher.stats.refused["replay"] > before)  # noqa: B023
                assert not listener.complete.is_set()
                assert listener.follower.expected is None
        async with listening(allowed) as listener:
            await until(listener.complete.is_set)
            one.keys.grow(3)
            await settle(one, listener)
            assert listener.follower.held.counts() == {(0, "GPU"): 8}


@pytest.mark.anyio
async def test_a_key_without_clients_encrypts_for_anyone(tmp_path: Path) -> None:
    async with (
        published(kv_events_curve_key=file_of(tmp_path, "server", SERVER.secret)) as one,
        listening(one.publication._replace(keys=STRANGER, server=SERVER.public)) as listener,
    ):
        await until(listener.complete.is_set)


@pytest.mark.anyio
async def test_a_client_that_is_added_to_the_file_is_admitted_without_a_restart(tmp_path: Path) -> None:
    async with (
        published(**settings(tmp_path)) as one,
        listening(one.publication._replace(keys=STRANGER, server=SERVER.public)) as listener,
    ):
        await until(lambda: one.publisher.stats.refused["replay"])
        file_of(tmp_path, "clients", CLIENT.public, STRANGER.public)
        await asyncio.wait_for(listener.complete.wait(), 30)


def test_a_file_that_becomes_invalid_leaves_the_clients_unchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients = AllowedClients("kv_events_curve_clients", file_of(tmp_path, "clients", CLIENT.public))
    file_of(tmp_path, "clients", b"nonsense")
    assert clients.callback("*", CLIENT.public)
    assert not clients.callback("*", STRANGER.public)
    assert "keeping the previous clients: kv_events_curve_clients must have keys of 40 characters" in caplog.text


@pytest.mark.parametrize("lines", [[], [b"# nobody", b""]])
def test_a_file_that_loses_all_its_keys_admits_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: list[bytes]
) -> None:
    clients = AllowedClients("kv_events_curve_clients", file_of(tmp_path, "clients", CLIENT.public))
    assert clients.callback("*", CLIENT.public)
    file_of(tmp_path, "clients", *lines)
    assert not clients.callback("*", CLIENT.public)
    assert "no new client is admitted: kv_events_curve_clients has no key: " in caplog.text
    file_of(tmp_path, "clients", STRANGER.public, CLIENT.public)
    assert clients.callback("*", CLIENT.public)


def test_a_file_that_is_removed_leaves_the_clients_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clients = AllowedClients("kv_events_curve_clients", path := file_of(tmp_path, "clients", CLIENT.public))
    Path(path).unlink()
    assert clients.callback("*", CLIENT.public)
    assert "keeping the previous clients: kv_events_curve_clients cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("name", "lines", "fault"),
    [
        ("kv_events_curve_key", [], "kv_events_curve_key must have one key, not 0"),
        ("kv_events_curve_key", [SERVER.secret, SERVER.secret], "kv_events_curve_key must have one key, not 2"),
        ("kv_events_curve_key", [b"short"], "kv_events_curve_key must have keys of 40 characters in Z85: line 1 of"),
        ("kv_events_curve_key", [b" " + b"~" * 40], "kv_events_curve_key must have keys of 40 characters in Z85"),
        ("kv_events_curve_key", [b"$" * 40], "kv_events_curve_key must have keys of 40 characters in Z85"),
        ("kv_events_curve_key", [b"\xff"], "kv_events_curve_key cannot be read: .*: it is not ASCII text"),
        ("kv_events_curve_clients", [], "kv_events_curve_clients must have at least one key"),
        ("kv_events_curve_clients", [CLIENT.public, b"x"], "kv_events_curve_clients must have keys .*: line 2 of"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, name: str, lines: list[bytes], fault: str) -> None:
    values: dict[str, Any] = {**settings(tmp_path), name: file_of(tmp_path, "other", *lines)}
    with pytest.raises(InvalidSetting, match=fault):
        EventPublisher(EngineSettings(kv_events_listen=ANY, **values))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"kv_events_curve_key cannot be read: .*: No such file or directory"):
        EventPublisher(EngineSettings(kv_events_listen=ANY, kv_events_curve_key=str(tmp_path / "none")))
