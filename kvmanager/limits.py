"""What one pool may have, and one Step may ask: enough for any engine, and bounded in memory and in time.

Engine and KV manager have the same limits, because the engine's replica refuses what the manager does.
"""

# Live sequences of a pool: several hundred run on one group of accelerators, and each costs about a kilobyte.
MOST_SEQUENCES = 1 << 14
# Items of all lists of a Step but its lengths: a commit and an extend of each sequence.
MOST_ITEMS = 2 * MOST_SEQUENCES
# Blocks of one table: 2,097,152 tokens in blocks of 16.
LARGEST_TABLE = 1 << 17
# Tokens of one prompt, and of all prompts of a Step.
MOST_PROMPT_TOKENS = 1 << 21
# Tokens of all commits of a Step, of which an engine computes some thousands.
MOST_COMMITTED_TOKENS = 1 << 19
# Blocks that a Step grants, shares and moves, after which its next item has to wait for another Step.
MOST_STEP_BLOCKS = 1 << 15
# Table entries and pins beyond the first of each block: 64 samples of a prompt of 260,000 tokens have as many. A report
# takes up to 36 bytes for each.
MOST_SHARES = 1 << 20
MOST_PINS = 4096
# Of ids and salts that clients choose, of which a gateway makes them with its tenants' names.
LONGEST_ID = 512
LONGEST_SALT = 512
LONGEST_PIN_ID = 512
