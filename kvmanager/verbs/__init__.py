"""The verbs of a pool, one function each. A refused verb changes nothing."""
