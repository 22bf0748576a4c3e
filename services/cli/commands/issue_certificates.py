"""`quire certificates`: certificates for TLS between the services, from an authority of their own."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from services.cli.commands.authority import Authority, Issued

SERVICES = ("kvmanager", "engine", "gateway")
_FOLDER = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
_DAYS = click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), default=365.0, show_default=True, help="How long they last."
)
_WITHIN = click.FloatRange(min=0)


@click.group()
def certificates() -> None:
    """Make the certificates of TLS between the services."""


@certificates.command()
@_FOLDER
@click.option("--service", "services", multiple=True, default=SERVICES, show_default=True, help="Who gets one.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="SERVICE=HOST",
    help="One more name or address that a service is reached at, beside its own name and localhost.",
)
@_DAYS
@click.option(
    "--keep", is_flag=True, help="Where certificates are there, make what is missing, and renew what ends in 30 days."
)
def create(folder: Path, services: Sequence[str], hosts: Sequence[str], days: float, *, keep: bool) -> None:
    """Make an authority in FOLDER, and a certificate for each service.

    They go to FOLDER/SERVICE: certificate.pem, key.pem, and ca.pem, whom to trust. A service gets its folder alone;
    FOLDER/authority, which signs, goes nowhere. Nothing is overwritten.
    """
    try:
        _report(list(_create(folder, services, _by_service(hosts, services), days, keep)))
    except (InvalidSetting, OSError) as error:
        raise click.ClickException(str(error)) from error


@certificates.command()
@_FOLDER
@_DAYS
@click.option("--within-days", type=_WITHIN, default=30.0, show_default=True, help="Renew those that end so soon.")
@click.option("--all", "everything", is_flag=True, help="Renew all, whenever they end.")
def renew(folder: Path, days: float, within_days: float, *, everything: bool) -> None:
    """Replace certificates in FOLDER that end soon.

    The new ones have the same names. Services that run take them for their next connections, without a restart.
    """
    from services.cli.commands.authority import open_authority

    try:
        authority = open_authority(folder)
        _report(list(_renew(authority, days, None if everything else within_days)))
    except (InvalidSetting, OSError) as error:
        raise click.ClickException(str(error)) from error


def _create(
    folder: Path, services: Sequence[str], hosts: dict[str, list[str]], days: float, keep: bool
) -> "Iterator[Issued]":
    from services.cli.commands.authority import (
        check_host,
        check_service,
        has_authority,
        make_authority,
        now,
        open_authority,
    )

    for service in services:
        check_service(service)
        for host in hosts.get(service, []):
            check_host(host)
    authority = open_authority(folder) if keep and has_authority(folder) else make_authority(folder, now())
    if keep:
        yield from _renew(authority, days, within_days=30)
    there = authority.services()
    for service in services:
        if service not in there:
            yield authority.issue(service, hosts.get(service, []), days, now())


def _renew(authority: "Authority", days: float, within_days: float | None) -> "Iterator[Issued]":
    from services.cli.commands.authority import now

    for service in authority.services():
        if within_days is None or authority.ends(service) <= now() + timedelta(days=within_days):
            yield authority.renew(service, days, now())


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
