"""`quire certificates`: an authority and its certificates for TLS between the services."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from services.cli.options import FiniteFloat
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from services.cli.commands.authority import Issued

# A hundred years; an authority lasts ten.
_MAX_DAYS = 36500
SERVICES = ("kvmanager", "engine", "gateway")
_FOLDER = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
_DAYS = click.option(
    "--days", type=FiniteFloat(above=0, most=_MAX_DAYS), default=365.0, show_default=True, help="How long they last."
)
_WITHIN = FiniteFloat(least=0, most=_MAX_DAYS)


@click.group()
def certificates() -> None:
    """Make the certificates of TLS between the services."""


@certificates.command("create")
@_FOLDER
@click.option(
    "--service", "services", multiple=True, default=SERVICES, show_default=True, help="Service that gets a certificate."
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="SERVICE=HOST",
    help="Another name or address of a service, besides its own name and localhost.",
)
@_DAYS
@click.option(
    "--keep",
    is_flag=True,
    help="Keep existing certificates, create missing ones, and renew those that end within 30 days.",
)
def create_all(folder: Path, services: Sequence[str], hosts: Sequence[str], days: float, *, keep: bool) -> None:
    """Create an authority in FOLDER, and a certificate for each service.

    Each service has a folder FOLDER/SERVICE with certificate.pem, key.pem, and ca.pem, the authority to trust. Give
    each service only its own folder. Keep FOLDER/authority, which signs, to yourself. Nothing is overwritten.
    """
    from services.cli.commands.authority import create

    try:
        made = list(create(folder, services, _by_service(hosts, services), days, keep=keep))
    except (InvalidSetting, OSError) as error:
        raise click.ClickException(str(error)) from error
    _report(made)


@certificates.command("renew")
@_FOLDER
@_DAYS
@click.option(
    "--within-days",
    type=_WITHIN,
    default=30.0,
    show_default=True,
    help="Renew certificates that end within so many days.",
)
@click.option("--all", "everything", is_flag=True, help="Renew all certificates, whenever they end.")
def renew_all(folder: Path, days: float, within_days: float, *, everything: bool) -> None:
    """Renew certificates in FOLDER that end soon.

    The new ones have the same names. Running services use them for their next connections, without a restart.
    """
    from services.cli.commands.authority import open_authority, renew

    try:
        made = list(renew(open_authority(folder), days, None if everything else within_days))
    except (InvalidSetting, OSError) as error:
        raise click.ClickException(str(error)) from error
    _report(made)


def _by_service(hosts: Sequence[str], services: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in hosts:
        service, equals, host = entry.partition("=")
        if not (equals and host) or service not in services:
            raise InvalidSetting(f"host is {entry!r}, it must be SERVICE=HOST, with one of {', '.join(services)}")
        found.setdefault(service, []).append(host)
    return found


def _report(issued: "Sequence[Issued]") -> None:
    for one in issued:
        click.echo(f"{one.service}: until {one.ends:%Y-%m-%d %H:%M} UTC")
    if not issued:
        click.echo("nothing to do")
