"""Origins of web pages that may call the HTTP API."""

from urllib.parse import urlsplit

from services.runtime.settings import InvalidSetting

ALL = "*"
# Of pages, and of the pages of browser extensions and desktop applications.
_SCHEMES = ("http", "https", "chrome-extension", "moz-extension", "app", "tauri", "capacitor")


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
    try:
        parts = urlsplit(origin)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:  # of brackets, or of the port
        return False
    whole = origin == f"{parts.scheme}://{parts.netloc}" and "@" not in parts.netloc
    return whole and port_is_valid and parts.scheme in _SCHEMES and bool(parts.hostname)
