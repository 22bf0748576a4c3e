"""All ranks record their decoding steps, or none: a recorded step has padding, and so have its collectives."""

import json
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.errors import EngineBroken, RankFailed
from engine.model.decoder import Decoder
from engine.parallel import TorchRanks
from services.engine.startup.backends import NotRecorded

# For other ranks to fail at the same place. Those that wait in a collective for a failed rank report nothing.
_SECONDS_TO_AGREE = 10.0
_SECONDS_TO_RECORD = 1800.0  # the links show a rank that ends
_SECONDS_BETWEEN_LOOKS = 0.05  # no wait of the store, which would block torch's own use of it
_KEY = "quire/recorded"

log = logging.getLogger("quire.engine")


class _Outcome(NamedTuple):
    """What came of a rank's recording: the number of its collectives until then, and the fault, empty without one."""

    collectives: int
    fault: str


def recorded_or_launched(
    record: Callable[[], Decoder], launched: Decoder, ranks: TorchRanks, store: Any
) -> tuple[Decoder, dict[str, str]]:
    """Return the decoder of all ranks' decoding steps, recorded or launched, and why not recorded, empty if they are.

    Raises what `recorded_by_all` raises, apart from NotRecorded.
    """
    try:
        return recorded_by_all(record, ranks, store), {"decoding": ""}
    except NotRecorded as failure:
        return launched, {"decoding": str(failure)}


def recorded_by_all(
    record: Callable[[], Decoder], ranks: TorchRanks, store: Any, seconds: float = _SECONDS_TO_AGREE
) -> Decoder:
    """Return the result of `record` if no rank has a fault.

    Raises NotRecorded with this rank's fault if all have one, after equally many collectives. Raises EngineBroken, with
    the rank and its fault, if only some have one, or at different places: they would wait for each other in
    collectives. `seconds` limits the wait of a rank with a fault for the others. Raises RankFailed if another rank has
    ended.
    """
    recorded, fault, failed = None, "", None
    try:
        recorded = record()
    except (NotRecorded, RankFailed) as failure:  # RankFailed: a collective was refused, or another rank has ended
        fault, failed = str(failure) or type(failure).__name__, failure
        log.error("decoding steps cannot be recorded: %s", fault)
    store.set(f"{_KEY}/{ranks.rank}", json.dumps([ranks.collectives, fault]))
    outcomes = _outcomes(store, ranks.size, seconds if fault else _SECONDS_TO_RECORD)
    if len(outcomes) < ranks.size and isinstance(failed, RankFailed):
        raise failed
    faults = {rank: one.fault for rank, one in outcomes.items() if one.fault}
    if len(outcomes) < ranks.size or (faults and not _agree(list(outcomes.values()))):
        named = ranks.rank if fault else min(faults, default=min(set(range(ranks.size)) - set(outcomes), default=0))
        raise EngineBroken(f"decoding steps cannot be recorded on rank {named}: {faults.get(named, 'no response')}")
    if recorded is None:
        raise NotRecorded(fault) from failed
    return recorded


def _agree(outcomes: list[_Outcome]) -> bool:
    return all(one.fault for one in outcomes) and len({one.collectives for one in outcomes}) == 1


def _outcomes(store: Any, size: int, seconds: float) -> dict[int, _Outcome]:
    """Return the outcomes by rank as soon as all have one, or those that are there after so many seconds."""
    keys = {rank: f"{_KEY}/{rank}" for rank in range(size)}
    until = time.monotonic() + seconds
    while not store.check(list(keys.values())) and time.monotonic() < until:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return {rank: _Outcome(*json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}
