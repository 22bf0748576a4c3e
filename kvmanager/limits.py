"""What one pool may have, and one Step may ask: enough for any engine, and bounded in memory and in time.

Engine and KV manager have the same limits, because the engine's replica refuses what the manager does.
"""

# Live sequences of a pool: several hundred run on one group of accelerators, and each costs about a kilobyte.
MAX_SEQUENCES = 1 << 14
# Items of all lists of a Step but its lengths: a commit and an extend of each sequence.
MAX_ITEMS = 2 * MAX_SEQUENCES
# Blocks of one table: 2,097,152 tokens in blocks of 16.
MAX_TABLE_BLOCKS = 1 << 17
# Tokens of one prompt, and of all prompts of a Step.
MAX_PROMPT_TOKENS = 1 << 21
# Tokens of all commits of a Step, of which an engine computes some thousands.
MAX_COMMITTED_TOKENS = 1 << 19
# Blocks that a Step grants, shares and moves, after which its next item has to wait for another Step.
MAX_STEP_BLOCKS = 1 << 15
# Table entries and pins beyond the first of each block: 64 samples of a prompt of 260,000 tokens have as many. A report
# takes up to 36 bytes for each.
MAX_SHARES = 1 << 20
MAX_PINS = 4096
# Of ids and salts that clients choose, of which a gateway makes them with its tenants' names.
MAX_ID_LENGTH = 512
MAX_SALT_LENGTH = 512
MAX_PIN_ID_LENGTH = 512
