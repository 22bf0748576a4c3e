"""How a command reaches a service of Quire: where it is, whom to trust there, and what shows who calls."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc

from services.runtime import transport
from services.runtime.settings import InvalidSetting
from services.runtime.tls import ClientTLS, TLSFiles


@dataclass(frozen=True)
class Connection:
    """A service's address, how TLS is spoken to it, if at all, and the API key for it; empty: none."""

    address: str
    tls: ClientTLS | None = None
    api_key: str = ""

    @classmethod
    def of(cls, address: str, options: dict[str, Any]) -> "Connection":
        """Read the files that the options of `connection_options` name. Raises click.UsageError."""
        own = (options["certificate"], options["private_key"])
        if any(own) and not (all(own) and options["ca"]):
            raise click.UsageError("--certificate and --private-key belong together, and to --ca")
        if options["server_name"] and not options["ca"]:
            raise click.UsageError("--server-name is for TLS: give --ca")
        try:
            tls = ClientTLS(TLSFiles(*own, ca=options["ca"]), options["server_name"]) if options["ca"] else None
        except InvalidSetting as error:
            raise click.UsageError(str(error)) from error
        return cls(address, tls, _api_key(options["api_key"], options["api_key_file"]))

    def channel(self) -> grpc.aio.Channel:
        """Open a channel of its own."""
        return transport.channel(self.address, tls=self.tls)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call to a gateway must carry."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def _api_key(given: str, file: str) -> str:
    if given and file:
        raise click.UsageError("give one API key: both --api-key and --api-key-file are there, or in the environment")
    try:
        key = Path(file).read_text(encoding="utf-8").strip() if file else given.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--api-key-file cannot be read: {error}") from error
    if not (key.isascii() and key.isprintable()):
        raise click.UsageError("the API key has characters that no key has")
    return key
