"""`quire kv-events`: follows the KV events of an engine."""

import asyncio
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from services.cli.options import SECONDS
from services.runtime.addresses import check_tcp_server_address
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from services.engine.events.zeromq.listener import EventListener, Publication
    from services.engine.events.zeromq.vllm_format import WireEvent

_SHOWN_HASHES = 3
_FILE = click.Path(exists=True, dir_okay=False)


@click.command("kv-events")
@click.argument("address")
@click.option("--replay", default="", help="Address for replays and snapshots. Empty: only new events are read.")
@click.option("--topic", default="", help="Beginning of the topics to follow. Empty: all.")
@click.option("--print", "prints", is_flag=True, help="Print each event, without token ids, instead of counts.")
@click.option("--once", is_flag=True, help="Print the blocks of one snapshot, and end. Needs --replay.")
@click.option("--timeout", type=SECONDS, default=30.0, show_default=True, help="Deadline of --once, in seconds.")
@click.option("--interval", type=SECONDS, default=1.0, show_default=True, help="Seconds between two lines of counts.")
@click.option("--curve-key", type=_FILE, help="File of your CURVE secret key, made by `quire key curve`.")
@click.option("--curve-server", type=_FILE, help="File of the engine's CURVE public key.")
def kv_events(address: str, prints: bool, once: bool, timeout: float, interval: float, **options: str | None) -> None:
    """Follow the KV events of an engine, Quire's or vLLM's.

    ADDRESS is the engine's --kv-events-listen, as host:port; --once needs only --replay. Whenever the number of cached
    blocks has changed, it is printed by medium; with --print each event is printed instead. Kinds of blocks other than
    the first are shown by number.
    """
    if once and not options["replay"]:
        raise click.UsageError("--once needs --replay")
    publication = _publication(address, options)
    work = _once(publication, timeout) if once else _follow(publication, interval, prints=prints)
    asyncio.run(work)


def _publication(address: str, options: dict[str, str | None]) -> "Publication":
    """Read the options. Raises click.UsageError, and click.ClickException without the packages."""
    try:
        from services.engine.events.zeromq.curve import CurveKeys, read_key
        from services.engine.events.zeromq.listener import Publication
    except ImportError as error:
        raise click.ClickException(f"this needs pyzmq and msgspec: install the extra `routers` ({error})") from error
    key, server, replay = options["curve_key"], options["curve_server"], options["replay"] or ""
    if bool(key) != bool(server):
        raise click.UsageError("give --curve-key and --curve-server together")
    try:
        for name, one in (("ADDRESS", address), ("--replay", replay)):
            if one:
                check_tcp_server_address(name, one)
        keys = CurveKeys.read("--curve-key", key) if key else None
        own = read_key("--curve-server", server) if server else None
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error
    return Publication(address, replay, options["topic"] or "", keys, own)


async def _check_hosts(publication: "Publication") -> None:
    """Resolve the names of hosts: ZeroMQ would try them forever. Raises click.ClickException."""
    for address in filter(None, (publication.events, publication.replay)):
        host, _, port = address.rpartition(":")
        try:
            await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of a name is too long
            reason = error.strerror if isinstance(error, OSError) else "it is no name of a host"
            raise click.ClickException(f"cannot find the host of {address}: {reason}") from error


def _hint(publication: "Publication") -> str:
    keys = "are the keys right" if publication.keys else "does the engine ask for keys"
    return f"is it the engine's --kv-events-replay-listen, and {keys}?"


async def _once(publication: "Publication", timeout: float) -> None:
    from services.engine.events.zeromq.listener import EventListener

    await _check_hosts(publication)
    listener = EventListener(publication)
    following = asyncio.create_task(listener.run())
    try:
        await asyncio.wait_for(listener.complete.wait(), timeout)
    except TimeoutError:
        late = f"no snapshot from {publication.replay} within {timeout:g} s: {_hint(publication)}"
        raise click.ClickException(late) from None
    finally:
        following.cancel()
    click.echo(_counts(listener))


async def _follow(publication: "Publication", interval: float, *, prints: bool) -> None:
    from services.engine.events.zeromq.listener import EventListener

    await _check_hosts(publication)
    listener = EventListener(publication, _print_events if prints else lambda _sequence, _events: None)
    following = asyncio.create_task(listener.run())
    shown = ""
    while not following.done():
        await asyncio.wait([following], timeout=interval)
        line = _line(listener, publication.events)
        if line != shown and not (prints and listener.is_connected):
            click.echo(line, err=prints)
        shown = line
    following.result()


def _line(listener: "EventListener", address: str) -> str:
    """Return the counts, and before the first message and without a connection that."""
    missing = "" if listener.is_connected else f"not connected to {address}"
    if not listener.has_received:
        return missing or f"connected to {address}, nothing received yet"
    return _counts(listener) + f" ({missing})" * bool(missing)


def _counts(listener: "EventListener") -> str:
    """Return a line: the engine, its blocks, and what is not known."""
    held = [
        f"{f'kind {kind} ' if kind else ''}{medium} {count}"
        for (kind, medium), count in listener.follower.held.counts().items()
    ]
    description, lost = listener.description, listener.follower.lost
    name = f"{description.model} at {description.engine_id}: " if description else ""
    return f"{name}{', '.join(held) or 'no blocks'}" + f" ({lost} batches were lost)" * bool(lost)


def _print_events(sequence: int, events: "Sequence[WireEvent]") -> None:
    for event in events:
        click.echo(f"{sequence} {_shown(event)}")


def _shown(event: "WireEvent") -> str:
    from services.engine.events.zeromq.vllm_format import AllBlocksCleared, BlockStored, hashes, place_of

    if isinstance(event, AllBlocksCleared):
        return "cleared"
    kind, medium = place_of(event)
    found = [f"{one:016x}" for one in hashes(event)]
    shown = " ".join(found[:_SHOWN_HASHES]) + " ..." * (len(found) > _SHOWN_HASHES)
    verb = "stored" if isinstance(event, BlockStored) else "removed"
    return f"{verb} kind {kind} {medium}, blocks {len(found)}: {shown}"
