"""Shows to Prometheus when a service's certificates expire: whatever should renew them may have stopped."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge


def show_certificates(settings: Any, registry: CollectorRegistry) -> None:
    """Add the expiry of the certificates that a service's settings name, if there are any."""
    files = {"tls": settings.tls_certificate, "link": getattr(settings, "link_certificate", "")}
    given = {usage: path for usage, path in files.items() if path}
    if given:
        gauge = Gauge(
            "quire_tls_certificate_expiry_timestamp_seconds",
            "When the first certificate of the chain expires, in seconds since 1970; by its usage: tls, link.",
            labelnames=("usage",),
            registry=registry,
        )
        for usage, path in given.items():
            gauge.labels(usage).set_function(_Expiry(path).read)


class _Expiry:
    """When the first certificate of a PEM file expires. A file that is wrong leaves the value as it was."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seconds = math.nan  # since 1970

    def read(self) -> float:
        from cryptography import x509  # of use to those alone who have certificates

        with suppress(OSError, ValueError):
            chain = x509.load_pem_x509_certificates(self._path.read_bytes())
            self._seconds = min(certificate.not_valid_after_utc.timestamp() for certificate in chain)
        return self._seconds
