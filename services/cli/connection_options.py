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


def connection_options(*, api_key: bool = True) -> Callable[[Command], Command]:
    """Replace the parameter `address` of a command by a `connection`, made of it and of the options added here.

    They can also be set for all commands together: QUIRE_CA, QUIRE_API_KEY and so on.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def connected(address: str, **values: Any) -> None:
            from services.cli.connection import Connection

            names = [_parameter(flag) for flag, *_ in (*_OPTIONS, *_KEY_OPTIONS)]
            options = {name: values.pop(name, "") for name in names}
            command(connection=Connection.of(address, options), **values)

        for flag, variable, meaning in reversed((*_OPTIONS, *(_KEY_OPTIONS if api_key else ()))):
            connected = click.option(flag, default="", envvar=f"QUIRE_{variable}", help=meaning)(connected)
        return connected

    return decorate


def _parameter(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
