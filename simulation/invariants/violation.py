"""A violated invariant."""

import re

# Names of requests and processes, and numbers.
_DETAIL = re.compile(r"\b[a-z]?\d[\d.,]*")


class Violation(Exception):
    """Something that must be true is not; the message says what."""

    @property
    def kind(self) -> str:
        """The message without names and numbers."""
        return _DETAIL.sub("", str(self))
