"""The options of all commands that call a running Quire."""

import functools
from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., None]

_OPTIONS = (
    ("--ca", "CA", "Speak TLS, and trust a service whose certificate one in this PEM file has signed."),
    ("--certificate", "CERTIFICATE", "PEM file of the certificate to show a service that asks for one."),
    ("--private-key", "PRIVATE_KEY", "PEM file of that certificate's key."),
    ("--server-name", "SERVER_NAME", "Name that the service's certificate must have. Empty: the host of its address."),
)
_KEY_OPTIONS = (
    ("--api-key", "API_KEY", "API key. Others can see what is on a command line: the environment is the better place."),
    ("--api-key-file", "API_KEY_FILE", "File that has the API key."),
)


# Where services listen that were started one by one, unless told otherwise.
_ADDRESSES = {"gateway": "127.0.0.1:50051", "kvmanager": "127.0.0.1:50053"}


def address_option(service: str) -> Callable[[Command], Command]:
    """Add `--address` for the gateway or the kvmanager, as `connection_options` reads it."""
    called = {"gateway": "gateway", "kvmanager": "KV manager"}[service]
    meaning = f"Address of the {called}. Absent: that of the newest `quire serve` here, else {_ADDRESSES[service]}."
    return click.option("--address", help=meaning)


def connection_options(service: str = "gateway", *, api_key: bool = True) -> Callable[[Command], Command]:
    """Replace the parameter `address` of a command by a `connection`, made of it and of the options added here.

    Without an address it is the service of that name of a running `quire serve`. They can also be set for all commands
    together: QUIRE_CA, QUIRE_API_KEY and so on.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def connected(address: str | None, instance: str, **values: Any) -> None:
            from services.cli.connection import Connection

            names = [_parameter(flag) for flag, *_ in (*_OPTIONS, *_KEY_OPTIONS)]
            options = {name: values.pop(name, "") for name in names}
            # A load generator may have the URL of another server instead.
            place = address or ("" if values.get("url") else _found(service, instance))
            command(connection=Connection.of(place, options), **values)

        for flag, variable, meaning in reversed((*_OPTIONS, *(_KEY_OPTIONS if api_key else ()))):
            connected = click.option(flag, default="", envvar=f"QUIRE_{variable}", help=meaning)(connected)
        return click.option(
            "--instance",
            default="",
            envvar="QUIRE_INSTANCE",
            help="Name of the `quire serve` on this machine to call, where no address is given.",
        )(connected)

    return decorate


def _found(service: str, instance: str) -> str:
    """Return where a service of a running `quire serve` is, or where one that runs by itself would be."""
    from services.cli.local.instances import NoSuchInstance, find

    try:
        found = find(instance)
    except NoSuchInstance as error:
        raise click.UsageError(str(error)) from error
    return str(getattr(found, service)) if found else _ADDRESSES[service]


def _parameter(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
