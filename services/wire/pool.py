"""State of the KV manager's pools: counts and totals, sequences, blocks, cached prefixes."""

from collections.abc import Generator
from collections.abc import Sequence as Items

from kvmanager import BlockState, Pool, PoolState, PoolTotals, SequenceTable, Session, Tier, state_of
from quire.v1 import kvmanager_pb2 as pb
from services.wire.attach import window_kind_message
from services.wire.step_result import counts_message

_STATES = {state: pb.BlockState.Value(f"BLOCK_STATE_{state.name}") for state in BlockState}

# Fields of a registration that only order incarnations, and its window kinds, which are written with their counts.
_OMITTED = ("boot_id", "started_after_boot", "windows", "retention_tokens")

# Blocks and sequences written without a pause, and table entries per page.
_PAGE_BLOCKS = 2048
_PAGE_SEQUENCES = 64
_PAGE_ENTRIES = 65_536
# Sequences of one request that are shown.
_SHOWN_SEQUENCES = 16


def pool_message(session: Session) -> pb.PoolInfo:
    """Write a pool's counts and totals."""
    pool = session.pool
    return pb.PoolInfo(
        **{name: value for name, value in vars(pool.spec).items() if name not in _OMITTED},
        device=counts_message(pool.device.counts),
        host=counts_message(pool.host.counts),
        session=session.number,
        sequences=len(pool.sequences),
        groups=len(pool.groups),
        computed_tokens=pool.computed_tokens(),
        shared_blocks=pool.device.shared,
        saved_blocks=pool.device.saved,
        totals=_totals_message(session.totals),
        kinds=map(_kind_message, pool.windows),
    )


def _totals_message(totals: PoolTotals) -> pb.PoolTotals:
    sums = {"refusals": totals.refusals.total(), "condemned_blocks": totals.condemned_blocks.total()}
    return pb.PoolTotals(**vars(totals) | sums)


def _kind_message(window: PoolState) -> pb.WindowKindInfo:
    assert window.kind is not None
    return pb.WindowKindInfo(
        kind=window_kind_message(window.kind),
        device=counts_message(window.device.counts),
        host=counts_message(window.host.counts),
    )


def sequences_message(
    pool: Pool, found: Items[SequenceTable], size: int
) -> Generator[None, None, pb.ListSequencesResponse]:
    """Write a page of at most `size` sequences with their tables, in slices; long tables make it shorter."""
    page = pb.ListSequencesResponse()
    entries = written = 0
    for sequence in found[:size]:
        windows = [kind.sequences[sequence.id] for kind in pool.windows if sequence.id in kind.sequences]
        own = len(sequence.table) + sum(len(one.table) for one in windows)
        if written and entries + own > _PAGE_ENTRIES:
            break
        page.sequences.add(
            sequence=sequence.id,
            group=sequence.group,
            request_id=sequence.request_id,
            block_ids=sequence.table,
            computed_tokens=sequence.computed_tokens,
            room_tokens=sequence.room_tokens,
            committed_tokens=sequence.committed_blocks * pool.spec.block_size,
            windows=[pb.WindowTable(dropped=one.dropped, block_ids=one.table) for one in windows],
        )
        entries, written = entries + own, written + 1
        if not written % _PAGE_SEQUENCES:
            yield
    if written < len(found):
        page.next_page_token = str(found[written - 1].id)
    return page


def request_blocks_message(session: Session, group: int, entries: int) -> pb.GetRequestBlocksResponse:
    """Write what the sequences of a group hold, with the latest `entries` of each table."""
    pool = session.pool
    sequences = sorted(pool.groups.get(group, ()))
    return pb.GetRequestBlocksResponse(
        engine_id=pool.spec.engine_id,
        group=group,
        block_size=pool.spec.block_size,
        device_blocks=pool.spec.device_blocks,
        sequences=[_sequence_blocks(pool, pool.sequences[one], entries) for one in sequences[:_SHOWN_SEQUENCES]],
        sequence_count=len(sequences),
    )


def _sequence_blocks(pool: Pool, sequence: SequenceTable, entries: int) -> pb.SequenceBlocks:
    tier = pool.host if sequence.swapped else pool.device
    first = max(0, len(sequence.table) - entries)
    blocks = sequence.table[first:]
    return pb.SequenceBlocks(
        sequence=sequence.id,
        swapped=sequence.swapped,
        computed_tokens=sequence.computed_tokens,
        room_tokens=sequence.room_tokens,
        prompt_tokens=sequence.prompt_tokens,
        committed_blocks=sequence.committed_blocks,
        block_count=len(sequence.table),
        first_index=first,
        block_ids=blocks,
        counts=[tier.ref_count(block) for block in blocks],
        windows=[
            pb.WindowBlocks(kind=kind.kind_name, block_count=len(own.table), dropped=own.dropped)
            for kind in pool.windows
            if (own := kind.sequences.get(sequence.id))
        ],
    )


def block_map_message(tier: Tier, first: int, count: int) -> Generator[None, None, pb.GetBlockMapResponse]:
    """Write the states of `count` blocks, starting with block `first`, in slices."""
    blocks = range(first, min(first + count, tier.total + 1))
    page = pb.GetBlockMapResponse(first_block=first, next_block=blocks.stop if blocks.stop <= tier.total else 0)
    for start in range(0, len(blocks), _PAGE_BLOCKS):
        if start:
            yield
        some = blocks[start : start + _PAGE_BLOCKS]
        page.states.extend([_STATES[state_of(tier, block)] for block in some])
        page.counts.extend([tier.ref_count(block) for block in some])
        page.outlived_blocks.extend([block for block in some if block in tier.keys.outlived])
    return page
