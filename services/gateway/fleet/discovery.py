"""Discovery of engines and KV managers: a list of addresses, and DNS names that resolve to several."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from services.runtime.addresses import check_server_address
from services.runtime.settings import InvalidSetting

_DNS = "dns:"

log = logging.getLogger("quire.gateway")


@dataclass(frozen=True)
class ServiceAddresses:
    """The setting `engines` or `kvmanager`: fixed addresses, and DNS names with their port."""

    addresses: tuple[str, ...]
    names: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, setting: str, option: str = "engines") -> "ServiceAddresses":
        """Parse a comma-separated list such as `10.0.0.7:50052,dns:engines:50052`. Raises InvalidSetting."""
        entries = [entry.strip() for entry in setting.split(",")]
        if not all(entries):
            raise InvalidSetting(f"{option} must be addresses separated by commas, not {setting!r}")
        named = [entry.removeprefix(_DNS) for entry in entries if _has_name(entry)]
        plain = [entry for entry in entries if not _has_name(entry)]
        for entry in plain:
            check_server_address(option, entry)
        return cls(tuple(dict.fromkeys(plain)), tuple(dict.fromkeys(_name_and_port(option, one) for one in named)))


def _has_name(entry: str) -> bool:
    """Return True unless it is an address, or one that gRPC resolves itself (dns:///NAME:PORT)."""
    return entry.startswith(_DNS) and not entry.startswith(f"{_DNS}//")


def _name_and_port(option: str, entry: str) -> tuple[str, int]:
    name, _, port = entry.rpartition(":")
    if not (name and port.isdecimal()):
        raise InvalidSetting(f"{option} must name a host and port as {_DNS}NAME:PORT, not {_DNS}{entry}")
    check_server_address(option, entry)
    return name, int(port)


async def watch_addresses(services: ServiceAddresses, interval_seconds: float) -> AsyncIterator[Mapping[str, str]]:
    """Yield the services' addresses now and after each change.

    Each address maps to the DNS name that resolved to it, or to "" if it was configured as an address. Names are
    resolved again every `interval_seconds`. If that fails, the name keeps its previous addresses.
    """
    resolved: dict[tuple[str, int], frozenset[str]] = {}
    previous: Mapping[str, str] | None = None
    while True:
        for name in services.names:
            resolved[name] = await _resolve(*name, resolved.get(name, frozenset()))
        by_name = {address: name for (name, _), addresses in reversed(resolved.items()) for address in addresses}
        current = by_name | dict.fromkeys(services.addresses, "")
        if current != previous:
            previous = current
            yield current
        await asyncio.sleep(interval_seconds)


async def _resolve(name: str, port: int, previous: frozenset[str]) -> frozenset[str]:
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        log.log(logging.WARNING if previous else logging.DEBUG, "cannot resolve %s: %s", name, error)
        return previous
    return frozenset(_address(row[4][0], port) for row in rows)


def _address(host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
