"""A sandbox as JSON for the page."""

from dataclasses import asdict
from typing import Any

import kvmanager
from services.kvmanager.pages.playground.beam import BEAM_STAGES
from services.kvmanager.pages.playground.sandbox import Sandbox
from services.kvmanager.pages.playground.sandbox_pool import BLOCKS, SandboxPool


def sandbox_json(box: Sandbox) -> dict[str, Any]:
    """Describe a sandbox."""
    pool, core = box.pool, box.pool.core
    holders = pool.holders()
    words = {token: word for word, token in box.words.items()}
    return {
        "block_size": pool.block_size,
        "longest": pool.longest,
        "slots": BLOCKS * pool.block_size,
        "blocks": [_block(pool, block, holders.get(block, [])) for block in range(1, BLOCKS + 1)],
        "sequences": [_sequence(pool, sequence_id, words) for sequence_id in core.sequences],
        "counts": core.device.counts._asdict() | {"shared": core.device.shared, "saved": core.device.saved},
        "paged": core.slots()._asdict(),
        "contiguous": {name: slots._asdict() for name, slots in box.slots.items()},
        "slabs": {name: memory.slabs() for name, memory in box.memories.items()},
        "log": [asdict(line) for line in box.log.lines],
        "beam": {"stage": box.beam.stage, "stages": BEAM_STAGES},
        "undoable": bool(box.done),
    }


def _block(pool: SandboxPool, block: int, holders: list[int]) -> dict[str, Any]:
    device, size = pool.core.device, pool.block_size
    fills = []
    for sequence_id in holders:
        before = pool.core.sequences[sequence_id].table.index(block) * size
        fills.append(min(len(pool.text(sequence_id).token_ids) - before, size))
    state = kvmanager.state_of(device, block)
    cached = size if state is kvmanager.BlockState.CACHED else 0
    return {
        "block": block,
        "state": state.name.lower(),
        "count": device.ref_count(block),
        "keyed": device.key(block) is not None,
        "fill": max(fills, default=cached),
        "holders": holders,
    }


def _sequence(pool: SandboxPool, sequence_id: int, words: dict[int, str]) -> dict[str, Any]:
    text = pool.text(sequence_id)
    return {
        "sequence": sequence_id,
        "parent": text.parent,
        "tokens": len(text.token_ids),
        "final": text.final,
        "table": list(pool.core.sequences[sequence_id].table),
        "words": [words.get(token, "") for token in text.token_ids],
    }
