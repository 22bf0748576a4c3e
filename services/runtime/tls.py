"""TLS of Quire's servers and channels; certificates are PEM files, which are read again when they change.

Unusable files prevent a service from starting. Later they are logged and ignored, and the previous certificates stay
in use, so that a replacement in progress does no harm. Existing connections keep their certificates. TLS 1.2 and 1.3
are supported.
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
    """Paths of PEM files; empty: none.

    `certificate` is a chain that begins with the own certificate, and `key` is its private key. `ca` contains the
    authorities that sign the peers' certificates.
    """

    certificate: str = ""
    key: str = ""
    ca: str = ""
    names: tuple[str, str, str] = ("certificate", "key", "ca")  # of the options or settings, for messages

    def paths(self) -> list[str]:
        """Return the paths that are set."""
        return [path for path in (self.certificate, self.key, self.ca) if path]

    def check(self) -> None:
        """Raise InvalidSetting if a file is unreadable or empty, or if the key does not match the certificate."""
        certificate, key, ca = self.names
        for name, path in ((certificate, self.certificate), (ca, self.ca)):
            if path:
                _check_certificates(name, path)
        try:
            self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except ssl.SSLError as error:
            fault = f"must be the private key of {self.certificate!r}"
            if error.reason != "KEY_VALUES_MISMATCH":
                fault = "must have a private key in PEM form, without a password"
            raise InvalidSetting(f"{key} {fault}, not {self.key!r}") from error
        except (OSError, ValueError) as error:
            raise _unreadable(key, self.key, error) from error

    def _load_into(self, context: ssl.SSLContext) -> None:
        if self.ca:
            context.load_verify_locations(self.ca)
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key, password="")  # so that it does not prompt

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the files into a context, for new connections. Raises InvalidSetting without changing the context."""
        self.check()
        self._load_into(context)


def _check_certificates(name: str, path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise InvalidSetting(f"{name} must have certificates in PEM form, not {path!r}") from error
    except (OSError, ValueError) as error:
        raise _unreadable(name, path, error) from error


def _unreadable(name: str, path: str, error: Exception) -> InvalidSetting:
    reason = error.strerror if isinstance(error, OSError) else error
    return InvalidSetting(f"{name} cannot be read: {path!r}: {reason}")


class _Reloaded(Generic[T]):
    """A value made from files, and made again when the files change."""

    def __init__(self, files: TLSFiles, make: Callable[[], T]) -> None:
        files.check()
        self._files = files
        self._make = make
        self._version = version_of(*files.paths())
        self.made = make()

    def refresh(self) -> bool:
        """Return True if the value was made again."""
        version = version_of(*self._files.paths())
        if version == self._version:
            return False
        self._version = version
        try:
            self._files.check()
            self.made = self._make()
        except (InvalidSetting, OSError) as error:
            log.error("TLS: keeping the previous certificates: %s", error)
            return False
        log.info("TLS: reloaded %s", ", ".join(self._files.paths()))
        return True


class ServerTLS:
    """Certificate of a gRPC server; with a `ca`, clients need a certificate that it has signed."""

    def __init__(self, files: TLSFiles) -> None:
        """Read the files. Raises InvalidSetting."""
        self._files = files
        self._configuration = _Reloaded(files, self._read)

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a port, which check the files at each new connection."""
        changed: Any = self._changed  # the stub's type lacks None, which means no change
        return grpc.dynamic_ssl_server_credentials(
            self._configuration.made, changed, require_client_authentication=bool(self._files.ca)
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC on its own threads; concurrent calls may read the same files twice."""
        return self._configuration.made if self._configuration.refresh() else None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pair = (Path(self._files.key).read_bytes(), Path(self._files.certificate).read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], _bytes_of(self._files.ca))


class ServerContext:
    """Certificate of a server that takes an SSLContext: `reload_on_change` updates `context` in place.

    Certificates that were removed from `ca` stay trusted until the service restarts.
    """

    def __init__(self, files: TLSFiles) -> None:
        """Read the files. Raises InvalidSetting."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if files.ca:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._loaded = _Reloaded(files, lambda: files.load_into(self.context))

    async def reload_on_change(self) -> None:
        """Reload the files whenever they change, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            self._loaded.refresh()


class ClientTLS:
    """Authorities that a client trusts, and its own certificate."""

    def __init__(self, files: TLSFiles, server_name: str = "") -> None:
        """Read the files. `server_name` replaces the host of the address as the name expected in certificates.

        Raises InvalidSetting.
        """
        self.files = files
        self._contents = _Reloaded(files, self._read)
        self.server_name = server_name

    def with_server_name(self, name: str) -> "ClientTLS":
        """Return a copy that expects `name` in certificates, for an address that was resolved from this name.

        A configured server name takes precedence. Both share the files.
        """
        if self.server_name or not name:
            return self
        other = copy.copy(self)
        other.server_name = name
        return other

    def credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a new channel, from the current files."""
        self._contents.refresh()
        return grpc.ssl_channel_credentials(*self._contents.made)

    def _read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        files = self.files
        return _bytes_of(files.ca), _bytes_of(files.key), _bytes_of(files.certificate)


def server_tls(settings: Any) -> ServerTLS | None:
    """Return the TLS of a service's listener. Raises InvalidSetting."""
    return ServerTLS(listening_files(settings)) if settings.tls_certificate else None


def listening_files(settings: Any) -> TLSFiles:
    """Return the files of a service's listener."""
    names = ("tls_certificate", "tls_key", "tls_client_ca")
    return TLSFiles(settings.tls_certificate, settings.tls_key, settings.tls_client_ca, names)


def link_tls(settings: Any) -> ClientTLS | None:
    """Return the TLS of a service's outgoing link. Raises InvalidSetting."""
    if not settings.link_ca:
        return None
    own, names = (settings.link_certificate, settings.link_key), ("link_certificate", "link_key")
    if not settings.link_certificate:
        own, names = (settings.tls_certificate, settings.tls_key), ("tls_certificate", "tls_key")
    return ClientTLS(TLSFiles(*own, settings.link_ca, (*names, "link_ca")), settings.link_server_name)


def _bytes_of(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
