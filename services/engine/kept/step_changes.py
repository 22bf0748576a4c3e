"""What a block step that the replica has applied changes in the seals of kept memory.

Seals follow from the replica's state after the block step, not from the order of its verbs: a block that one verb
released and another granted is open, whatever came in between.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blocks import Commit, Copy, Step, StepItem
from engine.kept.seal_writer import SealChanges, TierChanges
from engine.kept.seals import Sealing
from kvmanager import AppliedStep, PoolState, Tier
from kvmanager.effects import RawEffect


class BeforeStep(NamedTuple):
    """What is lost when a block step is applied.

    `resets` and `first_index` are those of committing sequences, `keyed` are their blocks that had a key. `tables` are
    those that swaps replace. `swapped` are the freed sequences that were swapped out. `condemned` are the device blocks
    and the host blocks that the block step condemns.
    """

    resets: dict[int, int]
    first_index: dict[int, int]
    keyed: frozenset[int]
    tables: dict[int, list[int]]
    swapped: frozenset[int]
    condemned: tuple[list[int], list[int]] = ([], [])

    @classmethod
    def of(cls, state: PoolState, step: Step, kind: int) -> "BeforeStep":
        """Read the state of a kind of blocks before a block step."""
        sequences = state.sequences
        commits = [item for item in step.commits if item.sequence in sequences]
        swapped = (one for group in (*step.swap_outs, *step.swap_ins) for one in state.groups.get(group, ()))
        return cls(
            {item.sequence: sequences[item.sequence].resets for item in commits},
            {item.sequence: max(item.first_index, sequences[item.sequence].dropped) for item in commits},
            frozenset(
                block for item in commits for block in _committed(state, item) if state.device.key(block) is not None
            ),
            {sequence: sequences[sequence].table[:] for sequence in swapped},
            frozenset(
                one.sequence for one in step.frees if one.sequence in sequences and sequences[one.sequence].swapped
            ),
            (_condemned(step, kind, host=False), _condemned(step, kind, host=True)),
        )


def seal_changes(state: PoolState, before: BeforeStep, applied: AppliedStep) -> SealChanges:
    """Return what an applied block step changes in a kind of blocks."""
    result = applied.result
    device = _TierTouches(state.device, [copy.destination for copy in (*result.copies, *result.host_to_device)])
    host = _TierTouches(state.host, [copy.destination for copy in result.device_to_host])
    sealed = _sealings(before, applied)
    for effect in applied.effects:
        _touch(effect, before, device, host)
    for copies, sources in ((result.copies, device), (result.device_to_host, device), (result.host_to_device, host)):
        sources.touch([copy.source for copy in copies])
    return SealChanges(
        device.changes(sealed, [*result.withheld_blocks, *before.condemned[0]]),
        host.changes({}, [*result.host_withheld_blocks, *before.condemned[1]]),
        _with_key(state.host, result.device_to_host),
        _with_key(state.device, result.host_to_device),
        {block: sealing for block, (_, sealing) in sealed.items()},
        state.resets,
    )


def _condemned(step: Step, kind: int, *, host: bool) -> list[int]:
    return [block for one in step.condemns if (one.kind, one.host) == (kind, host) for block in one.blocks]


class _TierTouches:
    """The blocks of a tier that a block step touches, in groups in the order of its verbs."""

    def __init__(self, tier: Tier, destinations: list[int]) -> None:
        self._tier = tier
        self._destinations = destinations
        self._groups: list[Sequence[int]] = [destinations]

    def touch(self, blocks: Sequence[int]) -> None:
        self._groups.append(blocks)

    def changes(self, sealed: dict[int, tuple[bytes, Sealing]], withheld: Sequence[int]) -> TierChanges:
        tier, copied = self._tier, set(self._destinations)
        touched = dict.fromkeys(block for group in self._groups for block in group)
        opened = [block for block in touched if tier.key(block) is None]
        complete = {
            block: sealing for block, (key, sealing) in sealed.items() if block not in copied and tier.key(block) == key
        }
        held = [block for block in touched if tier.ref_count(block)]
        return TierChanges([*opened, *copied], complete, held, self._released(), withheld)

    def _released(self) -> list[list[int]]:
        """Return the cached blocks by the last group that touched each."""
        last = {block: at for at, group in enumerate(self._groups) for block in group}
        groups: list[list[int]] = [[] for _ in self._groups]
        for block, at in last.items():
            if not self._tier.ref_count(block) and self._tier.key(block) is not None:
                groups[at].append(block)
        return [group for group in groups if group]


def _sealings(before: BeforeStep, applied: AppliedStep) -> dict[int, tuple[bytes, Sealing]]:
    """Return key and sealing of each block that a commit has given its key.

    Commits are the first verbs of a block step, so of a block's keys theirs is the first: later ones belong to what the
    same block step has moved into the block. A block that had a key has got none by a commit.
    """
    keys: dict[int, bytes] = {}
    for block, key in zip(applied.sealed_blocks, applied.sealed_keys, strict=True):
        keys.setdefault(block, key)
    depths = dict(before.first_index)
    found = {}
    for verb, sequence, _, blocks, *_ in applied.effects:
        if verb is StepItem.COMMIT:
            for block in blocks:
                if block in keys and block not in before.keyed:
                    found[block] = keys[block], Sealing(keys[block], depths[sequence], before.resets[sequence])
                depths[sequence] += 1
    return found


def _committed(state: PoolState, item: Commit) -> list[int]:
    end, sequence = item.first_index + len(item.token_ids) // state.block_size, state.sequences[item.sequence]
    first, last = (max(0, place - sequence.dropped) for place in (item.first_index, end))
    return sequence.table[first:last]


def _touch(effect: RawEffect, before: BeforeStep, device: _TierTouches, host: _TierTouches) -> None:
    verb, sequence, _, blocks, _, _ = effect
    old = before.tables.get(sequence, ())
    match verb:
        case StepItem.SWAP_OUT:
            host.touch(blocks)
            device.touch(old)
        case StepItem.SWAP_IN:
            device.touch(blocks)
            host.touch(old)
        case StepItem.FREE if sequence in before.swapped:
            host.touch(blocks)
        case StepItem.CONDEMN:
            pass  # withheld, whatever else happens to them
        case _:
            device.touch(blocks)


def _with_key(tier: Tier, copies: Iterable[Copy]) -> list[Copy]:
    return [copy for copy in copies if tier.key(copy.destination) is not None]
