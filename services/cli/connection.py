"""The connection of a command to a service: address, TLS and API key; and its options.

Every command has the options, so that gRPC is imported only where a connection is made.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

import click

from services.cli.options import together
from services.runtime import bounded_file
from services.runtime.addresses import check_server_address
from services.runtime.ports import GATEWAY, KVMANAGER, local
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    import grpc

    from services.runtime.tls import ClientTLS

Command = Callable[..., None]

_OPTIONS = (
    ("--ca", "CA", "PEM file of trusted certificate authorities; enables TLS."),
    ("--certificate", "CERTIFICATE", "PEM file of the client certificate."),
    ("--private-key", "PRIVATE_KEY", "PEM file of the client certificate's key."),
    ("--server-name", "SERVER_NAME", "Name that the service's certificate must have. Empty: the host of its address."),
)
_KEY_OPTIONS = (
    ("--api-key", "API_KEY", "API key. Other users can see a command line: prefer the environment."),
    ("--api-key-file", "API_KEY_FILE", "File that holds the API key."),
)
# A device may never end; services bound messages themselves, more narrowly.
_MOST_CHARACTERS = 64 << 20
_MOST_KEY_BYTES = 1 << 16
_INSTANCE = "Name of the `quire serve` on this machine to call, if no address is given."
_NEEDED = (
    ("certificate", "private_key"),
    ("private_key", "certificate"),
    ("certificate", "ca"),
    ("server_name", "ca"),
)
# Default addresses of services that were started one by one.
_ADDRESSES = {"gateway": local(GATEWAY.grpc), "kvmanager": local(KVMANAGER.grpc)}


@dataclass(frozen=True)
class Connection:
    """A service's address, its TLS files and the API key for it; empty: none.

    `instance` says which `quire serve` it belongs to, if the user named neither an address nor an instance.
    """

    address: str
    tls: "ClientTLS | None" = None
    api_key: str = ""
    instance: str = ""

    @classmethod
    def of(cls, address: str, options: dict[str, Any]) -> "Connection":
        """Read the files that the options of `connection_options` name. Raises click.UsageError."""
        from services.runtime.tls import ClientTLS, TLSFiles

        own = (options["certificate"], options["private_key"])
        for name, needed in _NEEDED:
            if options[name] and not options[needed]:
                raise click.UsageError(f"{_flag(name)} needs {_flag(needed)}")
        files = TLSFiles(*own, ca=options["ca"], names=("--certificate", "--private-key", "--ca"))
        try:
            tls = ClientTLS(files, options["server_name"]) if options["ca"] else None
        except InvalidSetting as error:
            raise click.UsageError(str(error)) from error
        return cls(address, tls, _api_key(options["api_key"], options["api_key_file"]))

    def channel(self) -> "grpc.aio.Channel":
        """Open a new channel."""
        from services.runtime import transport

        return transport.channel(self.address, tls=self.tls)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call to a gateway."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def address_option(service: str) -> Callable[[Command], Command]:
    """Add `--address` for the gateway or the kvmanager, as `connection_options` reads it."""
    called = {"gateway": "gateway", "kvmanager": "KV manager"}[service]
    default = f"that of the newest `quire serve` on this machine, else {_ADDRESSES[service]}"
    meaning = f"Address of the {called}. Default: {default}."
    return click.option("--address", help=meaning)


def connection_options(service: str = "gateway", *, api_key: bool = True) -> Callable[[Command], Command]:
    """Replace the parameter `address` of a command by a `connection`, made of it and of the options added here.

    Without an address, the service of this name of a running `quire serve` is used. The options can also be set for all
    commands together: QUIRE_CA, QUIRE_API_KEY and so on.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def connected(address: str | None, instance: str, at: str | None = None, **values: Any) -> None:
            names = [variable.lower() for _, variable, _ in (*_OPTIONS, *_KEY_OPTIONS)]
            options = {name: values.pop(name, "") for name in names}
            # The load generator may have the URL of another server instead.
            _check_text(values)
            given = address or at
            # There may be several KV managers.
            for one in (given or "").split(",") if service == "kvmanager" else (given,):
                if one:
                    _check_address("--address" if address else "ADDRESS", one)
            place, note = (given or "", "") if given or values.get("url") else _found(service, instance)
            command(connection=replace(Connection.of(place, options), instance=note), **values)

        shown = (("--instance", "INSTANCE", _INSTANCE), *_OPTIONS, *(_KEY_OPTIONS if api_key else ()))
        return together(
            *(click.option(flag, default="", envvar=f"QUIRE_{name}", help=meaning) for flag, name, meaning in shown)
        )(connected)

    return decorate


def _check_text(values: dict[str, Any]) -> None:
    """Raise click.UsageError for a text that no message can carry: the shell passes any bytes."""
    for name, value in values.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not text.isascii():
                _check_encodable(_shown_name(name), text)


def _shown_name(name: str) -> str:
    """Return the name of a parameter of the current command, as its help shows it."""
    parameter = next((one for one in click.get_current_context().command.params if one.name == name), None)
    return parameter.human_readable_name if isinstance(parameter, click.Argument) else _flag(name)


def _check_encodable(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.UsageError(f"{name} must be UTF-8 text: its character {error.start + 1} is not") from error


def read_text(name: str, source: TextIO) -> str:
    """Read a stream to its end. Raises click.UsageError, with its name, unless it is UTF-8 text of bounded length."""
    try:
        text = source.read(_MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} must be UTF-8 text: {error.reason} at byte {error.start}") from error
    if len(text) > _MOST_CHARACTERS:
        raise click.UsageError(f"{name} must have at most {_MOST_CHARACTERS} characters")
    _check_encodable(name, text)
    return text


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_address(option: str, address: str) -> None:
    try:
        check_server_address(option, address)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error


def _found(service: str, instance: str) -> tuple[str, str]:
    """Return the address of a service of a running `quire serve`, or the service's default address.

    The second value says which one it is, empty if the user named it.
    """
    from services.cli.local.instances import NoSuchInstance, find, running

    try:
        found = find(instance)
    except NoSuchInstance as error:
        raise click.UsageError(str(error)) from error
    if found is None:
        return _ADDRESSES[service], ""
    others = ", ".join(one.name for one in running() if one.name != found.name)
    among = f", the newest; others run: {others} (--instance)" if others else ""
    return str(getattr(found, service)), "" if instance else f"this is the `quire serve` {found.name}{among}"


def _api_key(given: str, file: str) -> str:
    if given and file:
        raise click.UsageError("give either --api-key or --api-key-file, not both, also in the environment")
    try:
        key = bounded_file.read_text(file, _MOST_KEY_BYTES).strip() if file else given.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--api-key-file cannot be read: {error}") from error
    if not (key.isascii() and key.isprintable()):
        raise click.UsageError("the API key must be printable ASCII")
    return key
