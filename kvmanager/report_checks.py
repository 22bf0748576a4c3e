"""What no pool can have come to, though each entry of its report may be right by itself."""

from typing import TYPE_CHECKING

from kvmanager.errors import InvalidReport
from kvmanager.pool_spec import shortened
from kvmanager.pool_state import PoolState, Sequence
from kvmanager.tier import Tier

if TYPE_CHECKING:
    from kvmanager.report import PoolReport, TierReport


def check_numbers(report: "PoolReport") -> None:
    """Raise InvalidReport for numbers of the pool as a whole that cannot be."""
    if report.resets < 0:
        raise InvalidReport(f"resets is {report.resets}, it must not be negative")
    if report.last_step < 0:
        raise InvalidReport(f"last_applied_step is {report.last_step}, it must not be negative")
    for name, tier in (("device", report.device), ("host", report.host)):
        _check_tier(name, tier)


def _check_tier(name: str, tier: "TierReport") -> None:
    withheld = set(tier.withheld)
    if len(withheld) < len(tier.withheld):
        raise InvalidReport(f"{name}: a withheld block is listed twice")
    if block := next((block for block in tier.withheld if block in tier.keyed), 0):
        raise InvalidReport(f"{name} block {block} is withheld, but is found under a key")


class Sharing:
    """Checks that tables and pins share only what they can: the same place of each, an unkeyed block in one group."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._first: dict[tuple[bool, int], tuple[int, int]] = {}  # of shared blocks: place and group

    def add(self, sequence: Sequence) -> None:
        """Look at a sequence that was just taken in. Raises InvalidReport."""
        first = self._state.sequences[self._state.groups[sequence.group][0]]
        mine, others = ((one.request_id, one.salt, one.resets, one.prompt, one.swapped) for one in (sequence, first))
        if mine != others:
            raise InvalidReport(f"group {sequence.group} has sequences of different requests, or is partly swapped out")
        tier = self._state.host if sequence.swapped else self._state.device
        self._look(tier, sequence.table, sequence.group, f"sequence {sequence.id}")

    def add_pin(self, pin: str, blocks: list[int]) -> None:
        """Look at a pin. Raises InvalidReport."""
        if not pin or not blocks or len(set(blocks)) < len(blocks):
            raise InvalidReport(f"pin {shortened(pin)!r} has no name, no block, or one block twice")
        self._look(self._state.device, blocks, 0, f"pin {shortened(pin)!r}")

    def _look(self, tier: Tier, blocks: list[int], group: int, name: str) -> None:
        host = tier is self._state.host
        for place, block in enumerate(blocks):
            if tier.count(block) > 1:
                first_place, first_group = self._first.setdefault((host, block), (place, group))
                if first_place != place:
                    raise InvalidReport(f"{name} has block {block} at place {place}, another one at {first_place}")
                if first_group != group and tier.key(block) is None:
                    raise InvalidReport(f"{name} shares block {block}, which has no key, with another group")
