import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from services.gateway.fleet.discovery import ServiceAddresses, watch_addresses
from services.runtime.settings import InvalidSetting


def test_addresses_and_names_are_deduplicated() -> None:
    places = ServiceAddresses.of("10.0.0.1:5, unix:/tmp/e.sock,dns:engines.local:50052,10.0.0.1:5")
    assert places.addresses == ("10.0.0.1:5", "unix:/tmp/e.sock")
    assert places.names == (("engines.local", 50052),)


@pytest.mark.parametrize(
    "setting", ["", "a:1,,b:2", "dns:engines", "dns::1", "dns:engines:0", "dns:engines:70000", "dns:e:x"]
)
def test_an_invalid_list_of_engines_is_rejected(setting: str) -> None:
    with pytest.raises(InvalidSetting, match="engines"):
        ServiceAddresses.of(setting)


@pytest.mark.parametrize(
    ("engines", "answers", "expected"),
    [
        (
            "a:1,dns:e:7",
            [["10.0.0.1"], ["10.0.0.1"], ["10.0.0.2", "::1"]],
            [{"a:1": "", "10.0.0.1:7": "e"}, {"a:1": "", "10.0.0.2:7": "e", "[::1]:7": "e"}],
        ),
        ("dns:e:7", [["10.0.0.1"], OSError(), ["10.0.0.2"]], [{"10.0.0.1:7": "e"}, {"10.0.0.2:7": "e"}]),
        ("a:1,dns:e:7", [OSError(), ["10.0.0.2"]], [{"a:1": ""}, {"a:1": "", "10.0.0.2:7": "e"}]),
        (
            "10.0.0.1:7,dns:e:7,dns:f:7",
            [["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.3"], ["10.0.0.4"], ["10.0.0.4"]],
            [{"10.0.0.1:7": "", "10.0.0.2:7": "e", "10.0.0.3:7": "f"}, {"10.0.0.1:7": "", "10.0.0.4:7": "e"}],
        ),
    ],
    ids=[
        "only changes are reported",
        "an unresolvable name keeps its addresses",
        "an unresolved name does not delay the others",
        "a listed address has no name and the first of two names wins",
    ],
)
def test_names_are_resolved_periodically(
    monkeypatch: pytest.MonkeyPatch, engines: str, answers: list[Any], expected: list[dict[str, str]]
) -> None:
    remaining = list(answers)

    async def look_up(_self: object, _name: str, port: int, **_: object) -> object:
        answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in answer]

    async def first_two() -> list[Mapping[str, str]]:
        found: list[Mapping[str, str]] = []
        async for addresses in watch_addresses(ServiceAddresses.of(engines), interval_seconds=0.001):
            found.append(addresses)
            if len(found) == 2:
                break
        return found

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    assert asyncio.run(first_two()) == expected
