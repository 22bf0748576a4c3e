"""Where the engines are: a list of addresses, some of them names that stand for several."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from services.runtime.settings import InvalidSetting

_DNS = "dns:"
_LAST_PORT = 65535

log = logging.getLogger("quire.gateway")


@dataclass(frozen=True)
class EngineAddresses:
    """What the setting says: addresses as they are, and names with a port, whose addresses can change."""

    addresses: tuple[str, ...]
    names: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, setting: str) -> "EngineAddresses":
        """Read a list with commas, such as `10.0.0.7:50052,dns:engines:50052`. Raises InvalidSetting."""
        entries = [entry.strip() for entry in setting.split(",")]
        if not all(entries):
            raise InvalidSetting(f"engines is {setting!r}, it must be addresses with commas between them")
        named = [entry.removeprefix(_DNS) for entry in entries if entry.startswith(_DNS)]
        plain = [entry for entry in entries if not entry.startswith(_DNS)]
        return cls(tuple(dict.fromkeys(plain)), tuple(dict.fromkeys(map(_name_and_port, named))))


def _name_and_port(entry: str) -> tuple[str, int]:
    name, _, port = entry.rpartition(":")
    if not (name and port.isdecimal() and 0 < int(port) <= _LAST_PORT):
        raise InvalidSetting(f"engines has {_DNS}{entry}, it must be {_DNS}NAME:PORT")
    return name, int(port)


async def discovered(places: EngineAddresses, every_seconds: float) -> AsyncIterator[Mapping[str, str]]:
    """Yield the addresses of the engines, and again each time that they have changed.

    Each comes with the name that it was found by, which is empty for those that were given as addresses. Names are
    looked up again that often. A name that cannot be looked up keeps the addresses that it had.
    """
    found: dict[tuple[str, int], frozenset[str]] = {}
    sent: Mapping[str, str] | None = None
    while True:
        for name in places.names:
            found[name] = await _addresses(*name, found.get(name, frozenset()))
        by_name = {address: name for (name, _), addresses in reversed(found.items()) for address in addresses}
        now = by_name | dict.fromkeys(places.addresses, "")
        if now != sent:
            sent = now
            yield now
        await asyncio.sleep(every_seconds)


async def _addresses(name: str, port: int, before: frozenset[str]) -> frozenset[str]:
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        log.log(logging.WARNING if before else logging.DEBUG, "%s cannot be looked up: %s", name, error)
        return before
    return frozenset(_address(row[4][0], port) for row in rows)


def _address(host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
