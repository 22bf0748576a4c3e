"""`quire key`: makes API keys, and keys of KV events."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from services.gateway.access.api_keys import MAX_LIMIT, MAX_PRIORITY, digest_of, is_tenant_name, make_key
from services.runtime.settings import InvalidSetting


class _Expiry(click.ParamType[datetime]):
    name = "TIME"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> datetime:
        try:
            time = datetime.fromisoformat(value)
            time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"must be a time such as 2027-01-01 or 2027-01-01T00:00:00Z, not {value!r}", parameter, context)
        if time <= datetime.now(UTC):
            self.fail(f"must be in the future, not {value!r}", parameter, context)
        return time


@click.group()
def key() -> None:
    """Make API keys, and keys of KV events."""


@key.command()
@click.option("--tenant", required=True, help="Whose key it is: letters, digits, dots, dashes and underscores.")
@click.option(
    "--expires",
    type=_Expiry(),
    help="End of its validity, such as 2027-01-01 or 2027-01-01T00:00:00Z; without an offset in UTC. Default: never.",
)
@click.option("--operator", is_flag=True, help="Allow it to administer pins and the cache.")
@click.option(
    "--best-priority",
    type=click.IntRange(-MAX_PRIORITY - 1, MAX_PRIORITY),
    help="Smallest priority of its requests; smaller is served first. Default: 0.",
)
@click.option(
    "--max-concurrent-requests",
    type=click.IntRange(1, MAX_LIMIT),
    help="Maximum sequences (samples, beams) in flight with this key. Default: no limit.",
)
@click.option(
    "--tokens-per-minute", type=click.IntRange(1, MAX_LIMIT), help="Tokens of prompts and answers. Default: no limit."
)
def create(tenant: str, expires: datetime | None, operator: bool, **limits: int | None) -> None:
    """Make an API key.

    The key is shown once, on standard error. Its entry for the file of --api-keys goes to standard output:
    `quire key create --tenant acme >> api_keys.toml`. Limits are the tenant's: all its keys must state the same.
    """
    if not is_tenant_name(tenant):
        raise click.UsageError(
            f"--tenant must be 1 to 64 letters, digits, dots, dashes and underscores, not {tenant!r}"
        )
    made = make_key()
    lines = ["[[key]]", f'tenant = "{tenant}"', f'sha256 = "{digest_of(made).hex()}"']
    if expires:
        lines.append(f"expires = {expires.isoformat().replace('+00:00', 'Z')}")
    if operator:
        lines.append("operator = true")
    lines += [f"{name} = {limit}" for name, limit in limits.items() if limit is not None]
    entry = "\n".join(lines) + "\n"
    click.echo(entry)
    click.echo(f"The key (shown only once): {made}", err=True)


@key.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--show", is_flag=True, help="Print the public key of an existing FILE instead.")
def curve(file: Path, show: bool) -> None:
    """Make a pair of CURVE keys for KV events.

    The secret key goes to the new FILE, for --kv-events-curve-key of an engine, or --curve-key of a listener. The
    public key goes to standard output: a line for --kv-events-curve-clients, or a file for --curve-server.
    """
    try:
        from services.engine.events.zeromq.curve import CurveKeys
    except ImportError as error:
        raise click.ClickException(f"this needs pyzmq: install the extra `routers` ({error})") from error
    if show:
        try:
            click.echo(CurveKeys.read("FILE", str(file)).public.decode())
        except InvalidSetting as error:
            raise click.ClickException(str(error)) from error
        return
    keys = CurveKeys.new()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise click.ClickException(f"cannot write {str(file)!r}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(keys.secret + b"\n")
    click.echo(keys.public.decode())
    click.echo(f"The secret key is in {str(file)!r}", err=True)
