"""The verbs of a pool, one function each: all or nothing, a refusal leaves every count and order as it was."""
