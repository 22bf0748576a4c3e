"""Origins of web pages that may call the HTTP API."""

import re

from services.runtime.addresses import port_fault
from services.runtime.settings import InvalidSetting

ALL = "*"
# Schemes are also those of browser extensions and desktop applications.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]*))?")


def origins_of(text: str) -> list[str]:
    """Return the origins of a setting, in the form in which browsers send them."""
    return [origin.strip().lower() for origin in text.split(",") if origin.strip()]


def check_origins(option: str, text: str) -> None:
    """Raise InvalidSetting, naming the option, unless it has origins, such as https://chat.example:8443, or `*`."""
    for origin in origins_of(text) or [text]:
        if origin != ALL and not _is_origin(origin):
            raise InvalidSetting(
                f"{option} must have origins, scheme://host or scheme://host:port without a path, or {ALL},"
                f" not {origin[:100]!r}"
            )


def _is_origin(origin: str) -> bool:
    found = _ORIGIN.fullmatch(origin)
    return found is not None and not (found["port"] and port_fault(found["port"], least=1))
