"""API keys: parses the file of their hashes, and finds the caller of a key. Reads no clock and no file.

The file is TOML with a table for each key:

    [[key]]
    tenant = "acme"                   # 1 to 64 letters, digits, dots, dashes and underscores
    sha256 = "9f86d0..."              # of the key, 64 hexadecimal digits
    expires = 2027-01-01T00:00:00Z    # absent: never
    operator = false                  # absent: false
    best_priority = 0                 # the smallest (first served) that its requests may have; absent: 0
    max_concurrent_requests = 8       # of the tenant, in samples and beams; absent: no limit
    tokens_per_minute = 100000        # of the tenant; absent: no limit

A tenant can have several keys. The limits belong to the tenant, so all of its keys must state the same.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from services.gateway.access.callers import Caller
from services.runtime.errors import Unauthenticated
from services.runtime.settings import InvalidSetting

# Identifies keys to people and to scanners for leaked secrets.
_PREFIX = "quire-"
_KEY_BYTES = 32
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_SCHEME = "bearer"
_LIMITS = ("max_concurrent_requests", "tokens_per_minute")
_FIELDS = ("tenant", "sha256", "expires", "operator", "best_priority", *_LIMITS)
MAX_PRIORITY = 2**31 - 1
# Exact as a float.
MAX_LIMIT = 10**12


@dataclass(frozen=True)
class TenantLimits:
    """Limits of a tenant, in sequences in flight and tokens per minute. None: no limit."""

    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True)
class _Key:
    caller: Caller
    digest: bytes
    expires: datetime | None
    limits: TenantLimits


_NO_KEY = "a valid API key is needed, as authorization: Bearer KEY, or x-api-key: KEY over HTTP"


class ApiKeys:
    """API keys by their hashes, and the limits by tenant."""

    def __init__(self, keys: list[_Key]) -> None:
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self._keys = {self._index(key.digest): key for key in keys}
        self.limits: Mapping[str, TenantLimits] = {key.caller.tenant: key.limits for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def caller(self, authorization: str | None, now: float) -> Caller:
        """Return the caller for a value of `authorization`; `now` is in seconds since 1970. Raises Unauthenticated.

        The message is the same for a missing and for an unknown key.
        """
        scheme, _, given = (authorization or "").partition(" ")
        key = self._keys.get(self._index(digest_of(given.strip()))) if scheme.lower() == _SCHEME else None
        if key is None:
            raise Unauthenticated(_NO_KEY)
        if key.expires is not None and key.expires.timestamp() <= now:
            raise Unauthenticated("the API key has expired")
        return key.caller

    def _index(self, digest: bytes) -> bytes:
        """Return a keyed hash of a digest, so that the time of a lookup reveals nothing about the keys."""
        return hmac.digest(self._secret, digest, "sha256")


def make_key() -> str:
    """Return a new key: 256 random bits as text."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 digest of a key, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_tenant_name(name: str) -> bool:
    """Return True if a tenant can have this name."""
    return _TENANT.fullmatch(name) is not None


def parse(text: str, path: str) -> ApiKeys:
    """Parse the text of the file `path`. Raises InvalidSetting with the path and the invalid entry or line."""
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidSetting(f"api_keys: {path!r} must be TOML: {error}") from error
    try:
        return ApiKeys(_keys_of(content))
    except ValueError as error:
        raise InvalidSetting(f"api_keys: {path!r}: {error}") from error


def _keys_of(content: dict[str, Any]) -> list[_Key]:
    # An empty file is more likely to be one just being written than the removal of all keys.
    if "key" not in content:
        raise ValueError("[[key]] is missing; for no keys, write key = []")
    if unknown := sorted(content.keys() - {"key"}):
        raise ValueError(f"unknown field {unknown[0]!r}; entries start with [[key]]")
    entries = content["key"]
    if not isinstance(entries, list):
        raise ValueError("key must be a list; entries start with [[key]]")
    keys: list[_Key] = []
    for number, entry in enumerate(entries, 1):
        try:
            key = _key_of(entry)
            _check_consistency(key, keys)
            keys.append(key)
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from error
    return keys


def _check_consistency(key: _Key, others: list[_Key]) -> None:
    for number, other in enumerate(others, 1):
        if other.digest == key.digest:
            raise ValueError(f"sha256 must be unique, entry {number} has the same")
        if other.caller.tenant == key.caller.tenant and other.limits != key.limits:
            raise ValueError(f"the limits of tenant {key.caller.tenant!r} must be those of entry {number}")


def _key_of(entry: Any) -> _Key:
    if not isinstance(entry, dict):
        raise ValueError("the entry must be a table")
    if unknown := sorted(entry.keys() - set(_FIELDS)):
        raise ValueError(f"unknown field {unknown[0]!r}")
    tenant, sha256, operator = entry.get("tenant", ""), entry.get("sha256", ""), entry.get("operator", False)
    if not isinstance(tenant, str) or not is_tenant_name(tenant):
        raise ValueError(f"tenant must be 1 to 64 letters, digits, dots, dashes and underscores, not {tenant!r}")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(
            "sha256 must be 64 hexadecimal digits"
        )  # the value is not shown, because it may be the key itself
    if not isinstance(operator, bool):
        raise ValueError(f"operator must be true or false, not {operator!r}")
    limits = TenantLimits(*(_limit(entry, name) for name in _LIMITS))
    return _Key(Caller(tenant, operator, _best_priority(entry)), bytes.fromhex(sha256), _expiry(entry), limits)


def _expiry(entry: dict[str, Any]) -> datetime | None:
    expires = entry.get("expires")
    if expires is None:
        return None
    if not isinstance(expires, datetime) or expires.tzinfo is None:
        raise ValueError(f"expires must be a date and time with a zone, like 2027-01-01T00:00:00Z, not {expires}")
    return expires


def _best_priority(entry: dict[str, Any]) -> int:
    best = entry.get("best_priority", 0)
    if type(best) is not int or not -MAX_PRIORITY - 1 <= best <= MAX_PRIORITY:
        raise ValueError(f"best_priority must be an integer of 32 bits, not {best!r}")
    return best


def _limit(entry: dict[str, Any], name: str) -> int | None:
    limit = entry.get(name)
    if limit is None:
        return None
    if type(limit) is not int or not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"{name} must be an integer between 1 and {MAX_LIMIT}, not {limit!r}")
    return limit
