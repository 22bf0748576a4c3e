import asyncio
import socket
from collections.abc import Mapping

import pytest

from services.gateway.fleet.discovery import EngineAddresses, watch_addresses
from services.runtime.settings import InvalidSetting


def test_addresses_and_names_are_deduplicated() -> None:
    places = EngineAddresses.of("10.0.0.1:5, unix:/tmp/e.sock,dns:engines.local:50052,10.0.0.1:5")
    assert places.addresses == ("10.0.0.1:5", "unix:/tmp/e.sock")
    assert places.names == (("engines.local", 50052),)


@pytest.mark.parametrize(
    "setting", ["", "a:1,,b:2", "dns:engines", "dns::1", "dns:engines:0", "dns:engines:70000", "dns:e:x"]
)
def test_an_invalid_list_of_engines_is_rejected(setting: str) -> None:
    with pytest.raises(InvalidSetting, match="engines"):
        EngineAddresses.of(setting)


async def first_two(
    places: EngineAddresses, answers: list[object], monkeypatch: pytest.MonkeyPatch
) -> list[Mapping[str, str]]:
    async def look_up(_self: object, name: str, port: int, **_: object) -> object:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in answer]  # type: ignore[attr-defined]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    found = []
    async for addresses in watch_addresses(places, interval_seconds=0.001):
        found.append(addresses)
        if len(found) == 2:
            break
    return found


def test_a_name_is_resolved_again_and_only_changes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [["10.0.0.1"], ["10.0.0.1"], ["10.0.0.2", "::1"]]
    found = asyncio.run(first_two(EngineAddresses.of("a:1,dns:e:7"), answers, monkeypatch))
    assert found == [{"a:1": "", "10.0.0.1:7": "e"}, {"a:1": "", "10.0.0.2:7": "e", "[::1]:7": "e"}]


def test_a_name_that_cannot_be_resolved_keeps_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [["10.0.0.1"], OSError("no such name"), ["10.0.0.2"]]
    found = asyncio.run(first_two(EngineAddresses.of("dns:e:7"), answers, monkeypatch))
    assert found == [{"10.0.0.1:7": "e"}, {"10.0.0.2:7": "e"}]


def test_an_unresolved_name_does_not_hold_up_the_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [OSError("no such name"), ["10.0.0.2"]]
    found = asyncio.run(first_two(EngineAddresses.of("a:1,dns:e:7"), answers, monkeypatch))
    assert found == [{"a:1": ""}, {"a:1": "", "10.0.0.2:7": "e"}]


def test_a_listed_address_has_no_name_and_the_first_of_two_names_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[object] = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.3"], ["10.0.0.4"]]
    found = asyncio.run(first_two(EngineAddresses.of("10.0.0.1:7,dns:e:7,dns:f:7"), answers, monkeypatch))
    assert found[0] == {"10.0.0.1:7": "", "10.0.0.2:7": "e", "10.0.0.3:7": "f"}
