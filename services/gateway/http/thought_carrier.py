"""Carries the text of a thought through clients that send only `encrypted_content` or a signature of it back.

It is encoded, not encrypted: the client has the text anyway, and no gateway keeps a key.
"""

import base64
import binascii

_PREFIX = "quire-thought-1:"


def carried(thought: str) -> str:
    """Return a thought as the value of such a member."""
    return _PREFIX + base64.b64encode(thought.encode()).decode()


def thought_of(encrypted: str | None) -> str:
    """Return the thought in the value of such a member; empty if another server made it, or there is none."""
    if encrypted is None or not encrypted.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(encrypted.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
