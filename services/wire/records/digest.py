"""Digests of record files: each entry ends with that of all bytes up to it, so that damage is found at its place."""

from hashlib import sha256

_DIGEST_BYTES = 16
# The field `digest` of an entry as protobuf encodes it: number 7, with a length.
_FIELD = bytes((7 << 3 | 2, _DIGEST_BYTES))
FIELD_BYTES = len(_FIELD) + _DIGEST_BYTES


class RunningDigest:
    """SHA-256 over the entries of a file so far."""

    def __init__(self) -> None:
        self._hash = sha256()

    def field_after(self, entry: bytes) -> bytes:
        """Add an entry, and return the field that ends it."""
        self._hash.update(entry)
        return _FIELD + self._hash.digest()[:_DIGEST_BYTES]

    def accepts(self, data: bytes) -> bool:
        """Add an entry that ends with its digest; return False if that is not the one of its bytes."""
        return self.field_after(data[:-FIELD_BYTES]) == data[-FIELD_BYTES:]

    def ends_within(self, data: bytes) -> bool:
        """Return True if these bytes begin with a whole entry. Adds nothing."""
        place = data.find(_FIELD)
        while place >= 0:
            after = self._hash.copy()
            after.update(data[:place])
            if data[place:].startswith(_FIELD + after.digest()[:_DIGEST_BYTES]):
                return True
            place = data.find(_FIELD, place + 1)
        return False
