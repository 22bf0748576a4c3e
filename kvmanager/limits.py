"""Limits of one pool, one block step and one report: enough for any engine, and bounded in memory and time.

Engine and KV manager have the same limits, because the engine's replica must refuse the same items as the manager. A
report has those of the block steps that lead to its pool: each pool that block steps can reach is adopted.
"""

# Blocks of all pools together, if nothing else is set: 67 million tokens in blocks of 16. They take 150 MB of memory,
# and 1.1 GB if all have keys.
MAX_BLOCKS = 1 << 22
# Live sequences of a pool: several hundred run on one group of accelerators, and each costs about a kilobyte.
MAX_SEQUENCES = 1 << 14
# Items of a block step without its lengths: a commit and an extend of each sequence.
MAX_ITEMS = 2 * MAX_SEQUENCES
# Blocks of one table: 2,097,152 tokens in blocks of 16.
MAX_TABLE_BLOCKS = 1 << 17
# Tokens of one prompt, and of all prompts of a block step together.
MAX_PROMPT_TOKENS = 1 << 21
# Tokens of all commits of a block step; an engine computes some thousands in a step.
MAX_COMMITTED_TOKENS = 1 << 19
# Blocks of all condemns of a block step: those of a table.
MAX_CONDEMNED_BLOCKS = MAX_TABLE_BLOCKS
# Blocks that a block step grants, shares and moves; beyond this, items are refused as OUT_OF_BLOCKS until the next
# block step.
MAX_STEP_BLOCKS = 1 << 15
# Holders beyond the first, summed over the blocks of both tiers: 64 samples of a prompt of 260,000 tokens have as many.
# Each takes up to 36 bytes in a report.
MAX_SHARES = 1 << 20
MAX_PINS = 4096
# Ids and salts that clients choose, prefixed by the gateway with the tenant's name.
MAX_ID_LENGTH = 512
MAX_SALT_LENGTH = 512
MAX_PIN_ID_LENGTH = 512


def max_table_entries(blocks: int) -> int:
    """Return the maximum entries in tables and pins of a pool with `blocks` blocks in both tiers."""
    return blocks + MAX_SHARES
