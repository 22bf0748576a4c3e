"""condemn: withdraws the keys of blocks whose contents were found wrong, and withholds the blocks."""

from blocks import Condemn, StepItem
from kvmanager.applied import Outcome
from kvmanager.errors import InvalidItem
from kvmanager.parts import Parts, parts_of
from kvmanager.pool_state import PoolState
from kvmanager.tier.tier import Tier


def condemn(state: PoolState, item: Condemn, outcome: Outcome) -> Parts:
    """Withhold blocks of one tier of one kind, held ones on release. Blocks that are withheld already do not change."""
    kinds = state.kinds
    if not 0 <= item.kind < len(kinds):
        raise InvalidItem(f"kind must be between 0 and {len(kinds) - 1}, not {item.kind}")
    yield from _checking(kinds[item.kind], item)
    yield from _condemning(kinds[item.kind], item, (outcome, *outcome.windows)[item.kind])


def _checking(state: PoolState, item: Condemn) -> Parts:
    if not item.blocks:
        raise InvalidItem("blocks must not be empty")
    total = (state.host if item.host else state.device).total
    for part in parts_of(item.blocks):
        for block in part:
            if not 1 <= block <= total:
                tier = "host" if item.host else "device"
                raise InvalidItem(f"blocks must be between 1 and {total}, the {tier} blocks, not {block}")
        yield len(part)


def _condemning(state: PoolState, item: Condemn, outcome: Outcome) -> Parts:
    tier = state.host if item.host else state.device
    condemned: list[int] = []
    for part in parts_of(item.blocks):
        condemned += withhold_known(tier, part)
        yield len(part)
    if condemned:
        finder = state.sequences.get(item.sequence)
        outcome.effects.append((StepItem.CONDEMN, item.sequence, finder.group if finder else 0, condemned, (), item))


def withhold_known(tier: Tier, blocks: list[int]) -> list[int]:
    """Withhold blocks whose records are right, held ones on release, without a search.

    Returns those that were neither withheld nor marked before.
    """
    condemned = []
    for block in blocks:
        if not tier.marks.is_withheld_or_marked(block):
            holders = tier.ref_count(block)
            if block in tier.cached:
                tier.cached.remove(block)
            elif not holders and tier.key(block) is None:
                tier.free.discard(block)
            tier.withhold_unqueued(block, holders)
            condemned.append(block)
    return condemned
