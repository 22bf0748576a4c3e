"""API keys: the file of their hashes, and whose key came with a call. No clock, no file of its own.

The file is TOML with a table for each key:

    [[key]]
    tenant = "acme"                   # 1 to 64 letters, digits, dots, dashes and underscores
    sha256 = "9f86d0..."              # of the key, in hexadecimal digits
    expires = 2027-01-01T00:00:00Z    # absent: never
    operator = false                  # absent: false
    best_priority = 0                 # the smallest that its requests may have, which is served first; absent: 0
    max_concurrent_requests = 8       # of the tenant, counted by samples and beams; absent: no limit
    tokens_per_minute = 100000        # of the tenant; absent: no limit

A tenant can have several keys. Its limits are its own, so all of its keys must state the same.
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

# Says what a key is for to people and to programs that look for leaked secrets.
_PREFIX = "quire-"
_KEY_BYTES = 32
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_SCHEME = "bearer"
_LIMITS = ("max_concurrent_requests", "tokens_per_minute")
_FIELDS = ("tenant", "sha256", "expires", "operator", "best_priority", *_LIMITS)
_LARGEST_PRIORITY = 2**31 - 1
# Far below what a float holds exactly.
_LARGEST_LIMIT = 10**12


@dataclass(frozen=True)
class TenantLimits:
    """What a tenant may have under way, and use. None: no limit."""

    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True)
class _Key:
    caller: Caller
    digest: bytes
    expires: datetime | None
    limits: TenantLimits


class ApiKeys:
    """Keys by their hashes."""

    def __init__(self, keys: list[_Key]) -> None:
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self._keys = {self._place(key.digest): key for key in keys}
        self.limits: Mapping[str, TenantLimits] = {key.caller.tenant: key.limits for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def caller(self, authorization: str | None, now: float) -> Caller:
        """Return who sent this value of `authorization`; `now` is in seconds since 1970. Raises Unauthenticated.

        A missing key and a wrong one are refused in the same words.
        """
        scheme, _, given = (authorization or "").partition(" ")
        key = self._keys.get(self._place(digest_of(given.strip()))) if scheme.lower() == _SCHEME else None
        if key is None:
            raise Unauthenticated("a valid API key is needed, as authorization: Bearer KEY")
        if key.expires is not None and key.expires.timestamp() <= now:
            raise Unauthenticated("the API key has expired")
        return key.caller

    def _place(self, digest: bytes) -> bytes:
        """Return where a digest stands: nobody outside can foresee it, so the time of a look-up says nothing."""
        return hmac.digest(self._secret, digest, "sha256")


def make_key() -> str:
    """Return a new key: 256 random bits as text."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> bytes:
    """Return what the file has of a key, as bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_tenant_name(name: str) -> bool:
    """Whether a tenant can be called so."""
    return _TENANT.fullmatch(name) is not None


def parse(text: str, path: str) -> ApiKeys:
    """Read the text of a file. Raises InvalidSetting, naming `path` and the entry or line that is wrong."""
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidSetting(f"api_keys is {path!r}, which is no TOML: {error}") from error
    try:
        return ApiKeys(_keys_of(content))
    except ValueError as error:
        raise InvalidSetting(f"api_keys is {path!r}, {error}") from error


def _keys_of(content: dict[str, Any]) -> list[_Key]:
    # Nothing at all is more likely to be a file that is just being written than one that takes all keys away.
    if "key" not in content:
        raise ValueError("which has no [[key]]; to have no keys, say key = []")
    if unknown := sorted(content.keys() - {"key"}):
        raise ValueError(f"whose {unknown[0]!r} means nothing; entries begin with [[key]]")
    entries = content["key"]
    if not isinstance(entries, list):
        raise ValueError("whose key is no list; entries begin with [[key]]")
    keys: list[_Key] = []
    for number, entry in enumerate(entries, 1):
        try:
            keys.append(_beside(keys, _key_of(entry)))
        except ValueError as error:
            raise ValueError(f"whose entry {number} is wrong: {error}") from error
    return keys


def _beside(others: list[_Key], key: _Key) -> _Key:
    """Check a key against those before it."""
    for number, other in enumerate(others, 1):
        if other.digest == key.digest:
            raise ValueError(f"sha256 is that of entry {number}")
        if other.caller.tenant == key.caller.tenant and other.limits != key.limits:
            raise ValueError(f"entry {number} states other limits for the tenant {key.caller.tenant!r}")
    return key


def _key_of(entry: Any) -> _Key:
    if not isinstance(entry, dict):
        raise ValueError("it is no table")
    if unknown := sorted(entry.keys() - set(_FIELDS)):
        raise ValueError(f"{unknown[0]!r} is no field of it")
    tenant, sha256, operator = entry.get("tenant", ""), entry.get("sha256", ""), entry.get("operator", False)
    if not isinstance(tenant, str) or not is_tenant_name(tenant):
        raise ValueError(f"tenant is {tenant!r}, it must be 1 to 64 letters, digits, dots, dashes and underscores")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError("sha256 must be 64 hexadecimal digits")  # not shown: it may be the key itself
    if not isinstance(operator, bool):
        raise ValueError(f"operator is {operator!r}, it must be true or false")
    limits = TenantLimits(*(_limit(entry, name) for name in _LIMITS))
    return _Key(Caller(tenant, operator, _best_priority(entry)), bytes.fromhex(sha256), _expiry(entry), limits)


def _expiry(entry: dict[str, Any]) -> datetime | None:
    expires = entry.get("expires")
    if expires is None:
        return None
    if not isinstance(expires, datetime) or expires.tzinfo is None:
        raise ValueError(f"expires is {expires}, it must be a date and time with its zone: 2027-01-01T00:00:00Z")
    return expires


def _best_priority(entry: dict[str, Any]) -> int:
    best = entry.get("best_priority", 0)
    if type(best) is not int or not -_LARGEST_PRIORITY - 1 <= best <= _LARGEST_PRIORITY:
        raise ValueError(f"best_priority is {best!r}, it must be a whole number of 32 bits")
    return best


def _limit(entry: dict[str, Any], name: str) -> int | None:
    limit = entry.get(name)
    if limit is None:
        return None
    if type(limit) is not int or not 1 <= limit <= _LARGEST_LIMIT:
        raise ValueError(f"{name} is {limit!r}, it must be a whole number from 1 to {_LARGEST_LIMIT}")
    return limit
