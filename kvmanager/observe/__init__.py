"""Views of a pool that change nothing: audit, block map, slots, block lifetimes."""
