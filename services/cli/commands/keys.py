"""`quire key`: makes API keys."""

from datetime import UTC, datetime

import click

from services.gateway.access.api_keys import digest_of, make_key, parse


def create(tenant: str, expires: datetime | None, *, operator: bool, limits: dict[str, int | None]) -> None:
    """Print a new key on stderr, and on stdout its entry for the file. Raises InvalidSetting for a wrong field.

    `expires` without a zone is in UTC.
    """
    key = make_key()
    lines = ["[[key]]", f'tenant = "{tenant}"', f'sha256 = "{digest_of(key).hex()}"']
    if expires:
        zoned = expires if expires.tzinfo else expires.replace(tzinfo=UTC)
        lines.append(f"expires = {zoned.isoformat()}")
    if operator:
        lines.append("operator = true")
    lines += [f"{name} = {limit}" for name, limit in limits.items() if limit is not None]
    entry = "\n".join(lines) + "\n"
    parse(entry, "the new entry")
    click.echo(entry)
    click.echo(f"The key, which is kept nowhere: {key}", err=True)
