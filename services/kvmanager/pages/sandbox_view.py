"""What the page shows of a sandbox."""

from typing import Any

import kvmanager
from services.kvmanager.pages.beam import BEAM_STAGES
from services.kvmanager.pages.sandbox import BLOCKS, Sandbox


def sandbox_json(box: Sandbox) -> dict[str, Any]:
    """Describe everything."""
    pool, device = box.pool, box.pool.device
    holders = box.holders()
    words = {token: word for word, token in box.state.words.items()}
    return {
        "block_size": box.block_size,
        "longest": box.longest,
        "slots": BLOCKS * box.block_size,
        "blocks": [_block(box, block, holders.get(block, [])) for block in range(1, BLOCKS + 1)],
        "sequences": [_sequence(box, number, words) for number in pool.sequences],
        "counts": device.counts._asdict() | {"shared": device.shared, "saved": device.saved},
        "paged": pool.slots()._asdict(),
        "contiguous": {name: slots._asdict() for name, slots in box.slots.items()},
        "slabs": {name: memory.slabs() for name, memory in box.state.memories.items()},
        "log": [{"operation": one.operation, "text": one.text, "refused": one.refused} for one in box.state.log],
        "beam": {"stage": box.state.beam.stage, "stages": BEAM_STAGES},
        "undoable": bool(box.done),
    }


def _block(box: Sandbox, block: int, holders: list[int]) -> dict[str, Any]:
    device, size = box.pool.device, box.block_size
    fills = []
    for number in holders:
        before = box.pool.sequences[number].table.index(block) * size
        fills.append(min(len(box.text(number).token_ids) - before, size))
    state = kvmanager.state_of(device, block)
    cached = size if state is kvmanager.BlockState.CACHED else 0
    return {
        "block": block,
        "state": state.name.lower(),
        "count": device.count(block),
        "keyed": device.key(block) is not None,
        "fill": max(fills, default=cached),
        "holders": holders,
    }


def _sequence(box: Sandbox, number: int, words: dict[int, str]) -> dict[str, Any]:
    text = box.text(number)
    return {
        "sequence": number,
        "parent": text.parent,
        "tokens": len(text.token_ids),
        "final": text.final,
        "table": list(box.pool.sequences[number].table),
        "words": [words.get(token, "") for token in text.token_ids],
    }
