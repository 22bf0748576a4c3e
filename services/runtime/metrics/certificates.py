"""Exports when a service's certificates expire, because their renewal may have stopped."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge


def show_certificates(settings: Any, registry: CollectorRegistry) -> None:
    """Export the expiry of the certificates in a service's settings, if there are any."""
    files = {"tls": settings.tls_certificate, "link": getattr(settings, "link_certificate", "")}
    given = {usage: path for usage, path in files.items() if path}
    if given:
        gauge = Gauge(
            "quire_tls_certificate_expiry_timestamp_seconds",
            "When the first certificate of the chain expires, in seconds since 1970; by usage: tls, link.",
            labelnames=("usage",),
            registry=registry,
        )
        for usage, path in given.items():
            gauge.labels(usage).set_function(_Expiry(path).read)


class _Expiry:
    """Expiry of the first certificate in a PEM file. An invalid file leaves the last value."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seconds = math.nan  # since 1970

    def read(self) -> float:
        from cryptography import x509  # imported only if there are certificates

        with suppress(OSError, ValueError):
            chain = x509.load_pem_x509_certificates(self._path.read_bytes())
            self._seconds = min(certificate.not_valid_after_utc.timestamp() for certificate in chain)
        return self._seconds
