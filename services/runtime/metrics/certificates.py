"""Shows to Prometheus when a service's certificates expire: whatever should renew them may have stopped."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.runtime.file_version import FileVersion, version_of


def show_certificates(settings: Any, registry: CollectorRegistry) -> None:
    """Add the expiry of the certificates that a service's settings name, if there are any."""
    files = {"tls": settings.tls_certificate, "link": getattr(settings, "link_certificate", "")}
    given = {usage: path for usage, path in files.items() if path}
    if given:
        registry.register(_Expiry(given))


class _Expiry(Collector):
    """Reads a file again when it has changed, as TLS does; one that is wrong leaves the value as it was."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files
        self._versions: dict[str, FileVersion] = {}
        self._expires: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """Look at the files."""
        family = GaugeMetricFamily(
            "quire_tls_certificate_expiry_timestamp_seconds",
            "When the first certificate of the chain expires, in seconds since 1970; by its usage: tls, link.",
            labels=("usage",),
        )
        for usage, path in self._files.items():
            self._refresh(usage, path)
            if usage in self._expires:
                family.add_metric([usage], self._expires[usage])
        yield family

    def describe(self) -> Iterable[Metric]:
        """Name what `collect` gives."""
        return self.collect()

    def _refresh(self, usage: str, path: str) -> None:
        version = version_of(path)
        if self._versions.get(usage) == version:
            return
        self._versions[usage] = version
        try:
            self._expires[usage] = expires_at(path)
        except (OSError, ValueError):
            return


def expires_at(path: str) -> float:
    """Return when the first certificate of a PEM file expires, in seconds since 1970. Raises OSError or ValueError."""
    from cryptography import x509  # of use to those alone who have certificates

    chain = x509.load_pem_x509_certificates(Path(path).read_bytes())
    return min(certificate.not_valid_after_utc.timestamp() for certificate in chain)
