"""Who can reach a service, and what stands in the way: the settings of TLS and API keys, checked together.

Nothing here reads a file or needs gRPC; `services.runtime.tls` reads what these settings name.
"""

import ipaddress
import socket
from typing import Any

from services.runtime.settings import InvalidSetting

TLS_CERTIFICATE = "File of the certificate, with its chain, to listen with, in PEM. Empty: no TLS."
TLS_KEY = "File of that certificate's private key, in PEM."
TLS_CLIENT_CA = (
    "File of certificates, in PEM: only those get in whose own certificate one of them has signed. Empty: anyone."
)
LINK_CA = "File of certificates, in PEM, that {whom} certificate must be signed by. Empty: no TLS on this link."
LINK_CERTIFICATE = "File of the certificate to show on this link, in PEM. Empty: that of --tls-certificate."
LINK_KEY = "File of that certificate's private key, in PEM."
LINK_SERVER_NAME = "Name that {whom} certificate must have. Empty: the host of its address."
INSECURE = "Listen beyond this machine although {what}."

_UNIX = "unix:"
_LISTENING = ("listen", "http_listen", "map_listen")


def check_tls(settings: Any, links: tuple[str, ...] = ()) -> None:
    """Raise InvalidSetting for settings of TLS that do not go together. `links` names those of outgoing addresses."""
    _check_pair(settings, "tls_certificate", "tls_key")
    _check_needs(settings, "tls_client_ca", "tls_certificate")
    if settings.tls_certificate and not _over_network(settings, _LISTENING):
        raise InvalidSetting(f"tls_certificate is given, but listen is {settings.listen}: Unix sockets have no TLS")
    if links:
        _check_pair(settings, "link_certificate", "link_key")
        for name in ("link_certificate", "link_server_name"):
            _check_needs(settings, name, "link_ca")
        if settings.link_ca and not _over_network(settings, links):
            raise InvalidSetting(f"link_ca is given, but {links[0]} is a Unix socket, which has no TLS")


def check_exposure(settings: Any, guard: str, why: str) -> None:
    """Raise InvalidSetting where a service listens beyond this machine without its `guard`, a setting, being given.

    `why` says what is then missing. Asks the resolver for hosts that are names.
    """
    if settings.insecure or getattr(settings, guard):
        return
    for name in _LISTENING:
        address = getattr(settings, name, "")
        if address and not is_local(address):
            raise InvalidSetting(
                f"{name} is {address}, which others than this machine can reach, and {why}: give {guard}, or insecure"
            )


def is_local(address: str) -> bool:
    """Return True if the address is loopback. Addresses that do not resolve count as local."""
    if address.startswith(_UNIX):
        return True
    host, colon, _ = address.rpartition(":")
    if not colon:
        return True
    bare = host.removeprefix("[").removesuffix("]")
    if not host or (":" in host and bare == host):
        return False  # every address, or another notation of gRPC's
    try:
        found = socket.getaddrinfo(bare, None)
    except OSError:
        return True  # it cannot be listened on either
    return all(ipaddress.ip_address(place[0]).is_loopback for *_, place in found)


def _check_pair(settings: Any, first: str, second: str) -> None:
    _check_needs(settings, first, second)
    _check_needs(settings, second, first)


def _check_needs(settings: Any, name: str, other: str) -> None:
    if getattr(settings, name) and not getattr(settings, other):
        raise InvalidSetting(f"{name} is given, but {other} is not")


def _over_network(settings: Any, names: tuple[str, ...]) -> bool:
    addresses = [address.strip() for name in names for address in getattr(settings, name, "").split(",")]
    return any(address and not address.startswith(_UNIX) for address in addresses)
