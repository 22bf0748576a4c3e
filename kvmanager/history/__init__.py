"""The history of pools: events, the ledger that keeps them, explanations, and records of block steps."""
