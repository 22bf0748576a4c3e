"""Checks of addresses before anything is called or bound.

gRPC itself uses the last 16 bits of a port above the maximum, and treats an address without a port as a server that
does not answer.
"""

import re
from urllib.parse import urlsplit

from services.runtime.settings import InvalidSetting

MAX_PORT = 65535
_MAX_DIGITS = 16

_UNIX = re.compile(r"unix:\S+")
# Perhaps with one of gRPC's resolvers.
_HOST_AND_PORT = re.compile(r"(?:dns:(?:///)?|ipv[46]:)?(?P<host>[^\s/]*):(?P<port>-?[0-9]+)", re.ASCII)
# As sockets other than gRPC's take it.
_PLAIN = re.compile(r"(?P<host>\[[^\s\[\]]+\]|[^\s/:\[\]]+):(?P<port>-?[0-9]+)", re.ASCII)


def check_server_address(option: str, address: str) -> None:
    """Raise InvalidSetting, naming the option, unless a client can connect to it: host:port or unix:/path."""
    if not _UNIX.fullmatch(address):
        host = _check(option, address, "host:port or unix:/path", least_port=1)
        if not host:
            raise InvalidSetting(f"{option} must have a host before the port, not {address!r}")


def check_tcp_server_address(option: str, address: str) -> None:
    """Raise InvalidSetting, naming the option, unless a client can connect to it over TCP: host:port, [IPv6]:port."""
    found = _PLAIN.fullmatch(address)
    if found is None:
        raise InvalidSetting(f"{option} must be host:port, not {address!r}")
    _check_port(option, found["port"], 1)


def check_listen_address(option: str, address: str) -> None:
    """Raise InvalidSetting, naming the option, unless it is host:port or unix:/path. The host may be empty."""
    if not _UNIX.fullmatch(address):
        _check(option, address, "host:port or unix:/path")


def check_http_listen_address(option: str, address: str) -> None:
    """Raise InvalidSetting, naming the option, unless it is host:port."""
    _check(option, address, "host:port")


def check_url(option: str, url: str) -> None:
    """Raise InvalidSetting, naming the option, unless it begins with http://host:port or https://host:port."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # of brackets
        valid = False
    if not valid:
        raise InvalidSetting(f"{option} must be a URL, http://host:port or https://host:port, not {url!r}")
    if port := re.search(r":([^:\]]*)$", parts.netloc):
        _check_port(option, port[1], 1)


def port_fault(port: str, least: int = 0) -> str:
    """Return what is wrong with a port; empty: nothing. Servers may listen on port 0, which means any."""
    digits = port.isascii() and port.isdecimal() and len(port) <= _MAX_DIGITS
    valid = digits and least <= int(port) <= MAX_PORT
    return "" if valid else f"the port must be between {least} and {MAX_PORT}, not {port or 'empty'}"


def _check(option: str, address: str, form: str, least_port: int = 0) -> str:
    """Return the host."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None:
        raise InvalidSetting(f"{option} must be {form}, not {address!r}")
    _check_port(option, found["port"], least_port)
    return found["host"]


def _check_port(option: str, port: str, least: int) -> None:
    if fault := port_fault(port, least):
        raise InvalidSetting(f"{option}: {fault}")
