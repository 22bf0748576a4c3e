"""Who calls: by the API keys of a file, which is read again when it changes; or anyone, where there is no file."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from services.gateway.access.api_keys import ApiKeys, parse
from services.gateway.access.callers import ANONYMOUS, Caller
from services.gateway.access.tenants import Tenants
from services.runtime.file_version import version_of
from services.runtime.settings import InvalidSetting

_POLL_SECONDS = 1.0

log = logging.getLogger("quire.gateway")


class Authentication:
    """The keys that count now. Tells `tenants` the limits that the file states."""

    def __init__(self, path: str, tenants: Tenants, clock: Callable[[], float] = time.time) -> None:
        """Read the file; an empty path asks nobody for a key. Raises InvalidSetting.

        `clock` is in seconds since 1970.
        """
        self._path = path
        self._tenants = tenants
        self._clock = clock
        self._keys: ApiKeys | None = None
        if path:
            self._version = version_of(path)
            self._take(read(path))

    def authenticate(self, authorization: str | None) -> Caller:
        """Return who sent this value of `authorization`. Raises Unauthenticated."""
        if self._keys is None:
            return ANONYMOUS
        return self._keys.caller(authorization, self._clock())

    async def follow(self) -> None:
        """Read the file again whenever it changes, until cancelled. A wrong one changes nothing but the log.

        What runs goes on, also with a key that is there no more.
        """
        while self._path:
            await asyncio.sleep(_POLL_SECONDS)
            version = version_of(self._path)
            if version == self._version:
                continue
            self._version = version
            try:
                self._take(await asyncio.to_thread(read, self._path))
            except InvalidSetting as error:
                log.error("the API keys stay as they were: %s", error)
            else:
                log.info("%s API keys were read", len(self._keys or ()))

    def _take(self, keys: ApiKeys) -> None:
        self._keys = keys
        self._tenants.limit(keys.limits)


def read(path: str) -> ApiKeys:
    """Read a file of keys. Raises InvalidSetting."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"api_keys is {path!r}, which cannot be read: {error}") from error
    return parse(text, path)
