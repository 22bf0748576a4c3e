"""`quire key`: makes API keys."""

from datetime import UTC, datetime

import click

from services.runtime.settings import InvalidSetting


@click.group()
def key() -> None:
    """Make API keys."""


@key.command()
@click.option("--tenant", required=True, help="Whose key it is: letters, digits, dots, dashes and underscores.")
@click.option("--expires", type=click.DateTime(), help="End of its validity, in UTC. Default: never.")
@click.option("--operator", is_flag=True, help="Allow it to administer pins and the cache.")
@click.option(
    "--best-priority", type=int, help="Smallest priority of its requests; smaller is served first. Default: 0."
)
@click.option(
    "--max-concurrent-requests",
    type=click.IntRange(min=1),
    help="Maximum number of sequences (samples, beams) of its requests in flight. Default: no limit.",
)
@click.option(
    "--tokens-per-minute", type=click.IntRange(min=1), help="Tokens of prompts and answers. Default: no limit."
)
def create(tenant: str, expires: datetime | None, operator: bool, **limits: int | None) -> None:
    """Make an API key.

    The key is shown once, on standard error. Its entry for the file of --api-keys goes to standard output:
    `quire key create --tenant acme >> api_keys.toml`. The limits are the tenant's: all of its keys state the same.
    """
    from services.gateway.access.api_keys import digest_of, make_key, parse

    made = make_key()
    lines = ["[[key]]", f'tenant = "{tenant}"', f'sha256 = "{digest_of(made).hex()}"']
    if expires:
        lines.append(f"expires = {expires.replace(tzinfo=UTC).isoformat()}")
    if operator:
        lines.append("operator = true")
    lines += [f"{name} = {limit}" for name, limit in limits.items() if limit is not None]
    entry = "\n".join(lines) + "\n"
    try:
        parse(entry, "the new entry")
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error
    click.echo(entry)
    click.echo(f"The key, which is kept nowhere: {made}", err=True)
