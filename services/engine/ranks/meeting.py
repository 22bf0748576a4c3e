"""How ranks on several machines find each other: torchrun's store has the address where rank 0 sends the plans."""

import logging
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from engine.errors import RankFailed
from services.engine.ranks.link import RankLink
from services.engine.ranks.other_rank import OtherRank
from services.engine.ranks.placement import Placement
from services.engine.settings import EngineSettings

# For the ranks of all machines to start: some may have to fetch the image first.
SECONDS_TO_MEET = 1800.0
_ADDRESS = "quire/plans"
# A connection that does not say in this time which rank it is from is closed.
_SECONDS_TO_SAY = 5.0
_TOKEN_BYTES = 16
_HELLO_BYTES = 64
# A machine that vanishes while the ranks load is noticed after 5 + 5 x 5 s; then heartbeats notice it.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 5))

log = logging.getLogger("quire.engine")


def meet(place: Placement, seconds: float = SECONDS_TO_MEET) -> Any:
    """Return the store of all ranks, as soon as all have connected to it. Raises RankFailed if they do not in time."""
    where = f"{place.address}:{place.port}"
    log.info("rank %d waits for the others at %s", place.rank, where)
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except (DistError, ValueError) as error:
        raise RankFailed(f"rank {place.rank} did not meet the others at {where}: {_line(error)}") from error
    return store


def accept_ranks(
    settings: EngineSettings, place: Placement, store: Any, seconds: float = SECONDS_TO_MEET
) -> list[OtherRank]:
    """Return the links to all other ranks, which receive the settings. Raises RankFailed if one does not connect."""
    deadline = time.monotonic() + seconds
    token = secrets.token_hex(_TOKEN_BYTES)
    ranks: dict[int, OtherRank] = {}
    with _listener(place) as listener:
        store.set(_ADDRESS, f"{listener.getsockname()[1]} {token}")
        while missing := set(range(1, settings.tensor_parallel)) - set(ranks):
            try:
                connection = _accept(listener, deadline)
            except TimeoutError as error:
                raise RankFailed(f"no connection from rank {min(missing)} within {seconds:g} s") from error
            rank = _rank_of(connection, token)
            if rank in missing:
                ranks[rank] = OtherRank(rank, settings, connection)
            else:
                connection.close()
    return [ranks[rank] for rank in sorted(ranks)]


def connect(place: Placement, store: Any) -> RankLink:
    """Return this rank's link to rank 0. Raises RankFailed."""
    try:
        port, token = store.get(_ADDRESS).decode().split()
        connection = socket.create_connection((place.address, int(port)), timeout=_SECONDS_TO_SAY)
        connection.sendall(f"{token} {place.rank}".encode().ljust(_HELLO_BYTES))
    except (DistError, OSError) as error:
        raise RankFailed(f"rank {place.rank} cannot connect to rank 0 at {place.address}: {_line(error)}") from error
    _tune(connection)
    return RankLink(connection, "rank 0")


def _listener(place: Placement) -> socket.socket:
    """Listen only where the other ranks expect rank 0."""
    try:
        family, _, _, _, address = socket.getaddrinfo(place.address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise RankFailed(f"rank 0 cannot listen at MASTER_ADDR {place.address}: {_line(error)}") from error


def _accept(listener: socket.socket, deadline: float) -> socket.socket:
    listener.settimeout(max(0.001, deadline - time.monotonic()))
    return listener.accept()[0]


def _rank_of(connection: socket.socket, token: str) -> int | None:
    """Return the rank that a connection is from, None if it does not know the token of the store."""
    connection.settimeout(_SECONDS_TO_SAY)
    said = b""
    with suppress(OSError):
        while len(said) < _HELLO_BYTES and (part := connection.recv(_HELLO_BYTES - len(said))):
            said += part
    given, _, rank = said.decode("ascii", "replace").strip().partition(" ")
    if not secrets.compare_digest(given.encode(), token.encode()) or not rank.isdecimal():
        return None
    _tune(connection)
    return int(rank)


def _tune(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a plan must not wait for an acknowledgement
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
