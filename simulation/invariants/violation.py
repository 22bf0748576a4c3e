"""A violated invariant."""


class Violation(Exception):
    """Something that must be true is not; the message says what."""
