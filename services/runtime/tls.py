"""TLS of Quire's servers and channels: certificates from PEM files, which are read again when they change.

Files that cannot be used stop a service that starts. Later they are left aside, with a line in the log, and those
before them go on to count: a certificate that is just being replaced takes nothing down. Connections that are there
keep what they began with. TLS 1.2 and 1.3 are spoken.
"""

import asyncio
import copy
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from services.runtime.file_version import version_of
from services.runtime.settings import InvalidSetting

_POLL_SECONDS = 1.0

log = logging.getLogger("quire")

T = TypeVar("T")


@dataclass(frozen=True)
class TLSFiles:
    """PEM files, each by its path; empty: none.

    `certificate`, a chain that begins with the own one, and its `key` show who this is. `ca` has the certificates that
    those of the other side must be signed by.
    """

    certificate: str = ""
    key: str = ""
    ca: str = ""

    def paths(self) -> list[str]:
        """Return the files that are given."""
        return [path for path in (self.certificate, self.key, self.ca) if path]

    def check(self) -> None:
        """Raise InvalidSetting when a file cannot be read, holds nothing, or the key is not the certificate's."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            self._load_into(context)
        except (OSError, ValueError) as error:
            files = ", ".join(self.paths())
            raise InvalidSetting(f"TLS cannot be had with {files}: {error}") from error

    def _load_into(self, context: ssl.SSLContext) -> None:
        if self.ca:
            context.load_verify_locations(self.ca)
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key, password="")  # asks nobody at a terminal

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let a context use them for connections to come. Raises InvalidSetting, changing nothing."""
        self.check()
        self._load_into(context)


class _Reloaded(Generic[T]):
    """What is made of some files, and made again when they have changed."""

    def __init__(self, files: TLSFiles, make: Callable[[], T]) -> None:
        files.check()
        self._files = files
        self._make = make
        self._version = version_of(*files.paths())
        self.made = make()

    def refresh(self) -> bool:
        """Return whether it was made again."""
        version = version_of(*self._files.paths())
        if version == self._version:
            return False
        self._version = version
        try:
            self._files.check()
            self.made = self._make()
        except (InvalidSetting, OSError) as error:
            log.error("TLS stays as it was: %s", error)
            return False
        log.info("TLS: %s was read again", ", ".join(self._files.paths()))
        return True


class ServerTLS:
    """How a server shows who it is; with a `ca` it lets only those in whose certificate that has signed."""

    def __init__(self, files: TLSFiles) -> None:
        """Read the files. Raises InvalidSetting."""
        self._files = files
        self._configuration = _Reloaded(files, self._read)

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a port of gRPC; they look at the files at each new connection."""
        changed: Any = self._changed  # its stub does not know that None means: as before
        return grpc.dynamic_ssl_server_credentials(
            self._configuration.made, changed, require_client_authentication=bool(self._files.ca)
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC on threads of its own; two at once read the same files twice."""
        return self._configuration.made if self._configuration.refresh() else None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pair = (Path(self._files.key).read_bytes(), Path(self._files.certificate).read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], _bytes_of(self._files.ca))


class ServerContext:
    """The same for servers that take an SSLContext: `context` stays one, and `follow` keeps it up to date.

    Certificates that were trusted stay so until the service is started again, also when `ca` has them no more.
    """

    def __init__(self, files: TLSFiles) -> None:
        """Read the files. Raises InvalidSetting."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if files.ca:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._loaded = _Reloaded(files, lambda: files.load_into(self.context))

    async def reload_on_change(self) -> None:
        """Read the files again whenever they change, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            self._loaded.refresh()


class ClientTLS:
    """Whom a client trusts, and how it shows who it is where it is asked."""

    def __init__(self, files: TLSFiles, server_name: str = "") -> None:
        """Read the files. `server_name` replaces the host of the address in what certificates must name.

        Raises InvalidSetting.
        """
        self.files = files
        self._contents = _Reloaded(files, self._read)
        self.server_name = server_name

    def with_server_name(self, name: str) -> "ClientTLS":
        """Return the same for a service whose address was found by a name, which certificates must have then.

        A server name that is set goes before it. The files are read once for both.
        """
        if self.server_name or not name:
            return self
        other = copy.copy(self)
        other.server_name = name
        return other

    def credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a new channel, of the files as they are now."""
        self._contents.refresh()
        return grpc.ssl_channel_credentials(*self._contents.made)

    def _read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        files = self.files
        return _bytes_of(files.ca), _bytes_of(files.key), _bytes_of(files.certificate)


def server_tls(settings: Any) -> ServerTLS | None:
    """Return what a service's settings say of listening. Raises InvalidSetting."""
    return ServerTLS(listening_files(settings)) if settings.tls_certificate else None


def listening_files(settings: Any) -> TLSFiles:
    """Return the files that a service listens with."""
    return TLSFiles(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)


def link_tls(settings: Any) -> ClientTLS | None:
    """Return what a service's settings say of its outgoing link. Raises InvalidSetting."""
    if not settings.link_ca:
        return None
    own = (settings.link_certificate, settings.link_key)
    if not settings.link_certificate:
        own = (settings.tls_certificate, settings.tls_key)
    return ClientTLS(TLSFiles(*own, ca=settings.link_ca), settings.link_server_name)


def _bytes_of(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
