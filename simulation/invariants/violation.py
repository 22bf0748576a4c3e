"""A violated invariant."""

import re

# Names of requests and processes, and numbers.
_DETAIL = re.compile(r"\b[a-z]?\d[\d.,]*")


class Violation(BaseException):
    """Something that must be true is not; the message says what.

    It is no Exception, so that no handler of the product takes it for a failure of its own.
    """

    @property
    def kind(self) -> str:
        """The message without names and numbers."""
        return _DETAIL.sub("", str(self))
