"""Authenticates callers by the API keys of a file, which is reloaded when it changes."""

import asyncio
import logging
import time
from collections.abc import Callable

from services.gateway.access.api_keys import ApiKeys, parse
from services.gateway.access.callers import ANONYMOUS, Caller
from services.gateway.access.tenants import Tenants
from services.runtime.bounded_file import read_text
from services.runtime.file_version import version_of
from services.runtime.settings import InvalidSetting

_POLL_SECONDS = 1.0
_MOST_BYTES = 16 << 20

log = logging.getLogger("quire.gateway")


class Authentication:
    """Holds the current API keys, and sets the limits of `tenants`. Without a file, every caller is anonymous."""

    def __init__(self, path: str, tenants: Tenants, clock: Callable[[], float] = time.time) -> None:
        """Read the file; with an empty path no key is needed. Raises InvalidSetting.

        `clock` is in seconds since 1970.
        """
        self._path = path
        self._tenants = tenants
        self._clock = clock
        self._keys: ApiKeys | None = None
        if path:
            self._version = version_of(path)
            self._set(read(path))

    def authenticate(self, authorization: str | None) -> Caller:
        """Return the caller for a value of `authorization`. Raises Unauthenticated."""
        if self._keys is None:
            return ANONYMOUS
        return self._keys.caller(authorization, self._clock())

    async def reload_on_change(self) -> None:
        """Reload the file whenever it changes, until cancelled. An invalid file is logged and changes nothing.

        Requests in flight continue, even if their key was removed.
        """
        while self._path:
            await asyncio.sleep(_POLL_SECONDS)
            version = version_of(self._path)
            if version == self._version:
                continue
            self._version = version
            try:
                self._set(await asyncio.to_thread(read, self._path))
            except InvalidSetting as error:
                log.error("the API keys were not reloaded: %s", error)
            else:
                log.info("%s API keys were loaded", len(self._keys or ()))

    def _set(self, keys: ApiKeys) -> None:
        self._keys = keys
        self._tenants.set_limits(keys.limits)


def read(path: str) -> ApiKeys:
    """Read a file of keys. Raises InvalidSetting."""
    try:
        text = read_text(path, _MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"api_keys: cannot read {path!r}: {error}") from error
    return parse(text, path)
