"""No key leads to a block that an audit has withheld, or to a copy of it."""

from kvmanager.tier.tier import Tier


def mark_faults(tier: Tier) -> list[str]:
    """Return a message for each marked block that the index of keys contains."""
    if not tier.marks.marked_count:
        return []
    return [
        f"a key leads to block {block}, which is marked"
        for _, block in tier.keys.entries()
        if tier.marks.by_block[block]
    ]
