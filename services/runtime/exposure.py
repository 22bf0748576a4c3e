"""Settings of TLS and API keys, and checks that a service is not exposed without them.

This module reads no files and does not need gRPC; `services.runtime.tls` reads the files.
"""

import ipaddress
import socket
from typing import Any

from services.runtime.settings import InvalidSetting

TLS_CERTIFICATE = "PEM file of this service's certificate chain. Empty: no TLS."
TLS_KEY = "PEM file of that certificate's private key."
TLS_CLIENT_CA = (
    "PEM file of certificate authorities; clients need a certificate that one of them has signed. Empty: any client."
)
LINK_CA = "PEM file of the certificate authorities for {whom} certificate. Empty: no TLS on this link."
LINK_CERTIFICATE = "PEM file of the client certificate for this link. Empty: --tls-certificate."
LINK_KEY = "PEM file of that certificate's private key."
LINK_SERVER_NAME = "Expected name in {whom} certificate. Empty: the host of its address."
INSECURE = "Listen on addresses that other machines can reach, although {what}."

_UNIX = "unix:"
_LISTENING = ("listen", "http_listen", "map_listen")


def check_tls(settings: Any, links: tuple[str, ...] = ()) -> None:
    """Raise InvalidSetting for inconsistent TLS settings. `links` are the settings of outgoing addresses."""
    _check_pair(settings, "tls_certificate", "tls_key")
    _check_needs(settings, "tls_client_ca", "tls_certificate")
    if settings.tls_certificate and not _over_network(settings, _LISTENING):
        raise InvalidSetting(f"tls_certificate must be empty if listen is {settings.listen}: Unix sockets have no TLS")
    if links:
        _check_pair(settings, "link_certificate", "link_key")
        for name in ("link_certificate", "link_server_name"):
            _check_needs(settings, name, "link_ca")
        if settings.link_ca and not _over_network(settings, links):
            raise InvalidSetting(f"link_ca must be empty if {links[0]} is a Unix socket, which has no TLS")


def check_exposure(settings: Any, guard: str, why: str) -> None:
    """Raise InvalidSetting if other machines can reach the service and the setting `guard` is empty.

    `why` describes the risk. Resolves host names.
    """
    check_addresses(settings, _LISTENING, guard, "insecure", why)


def check_addresses(settings: Any, names: tuple[str, ...], guard: str, accepts: str, why: str) -> None:
    """Raise InvalidSetting if other machines can reach one of the addresses in the settings `names`.

    They may if the setting `guard` or `accepts` is set. `why` describes the risk. Resolves host names.
    """
    if getattr(settings, accepts) or getattr(settings, guard):
        return
    for name in names:
        address = getattr(settings, name, "")
        if address and not is_local(address):
            raise InvalidSetting(
                f"{name} is {address}, which other machines can reach, and {why}: set {guard}, or {accepts}"
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
        return False  # all addresses, or another notation of gRPC
    try:
        found = socket.getaddrinfo(bare, None)
    except OSError:
        return True  # the server cannot listen on it either
    return all(ipaddress.ip_address(place[0]).is_loopback for *_, place in found)


def _check_pair(settings: Any, first: str, second: str) -> None:
    _check_needs(settings, first, second)
    _check_needs(settings, second, first)


def _check_needs(settings: Any, name: str, other: str) -> None:
    if getattr(settings, name) and not getattr(settings, other):
        raise InvalidSetting(f"{name} is set, but {other} is not")


def _over_network(settings: Any, names: tuple[str, ...]) -> bool:
    addresses = [address.strip() for name in names for address in getattr(settings, name, "").split(",")]
    return any(address and not address.startswith(_UNIX) for address in addresses)
