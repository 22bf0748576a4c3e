"""Metrics of the expiry of certificates."""

from pathlib import Path
from types import SimpleNamespace

from cryptography import x509
from prometheus_client import CollectorRegistry

from services.runtime.metrics.certificates import show_certificates
from tests.certificates import Authority

NAME = "quire_tls_certificate_expiry_timestamp_seconds"


def expiry_of(path: Path) -> float:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()


def test_the_expiry_of_each_certificate_is_shown_and_follows_its_file(tmp_path: Path) -> None:
    authority, registry = Authority(tmp_path), CollectorRegistry()
    tls, link = authority.issue("gateway", days=9)[0], authority.issue("client", days=2)[0]
    show_certificates(SimpleNamespace(tls_certificate=str(tls), link_certificate=str(link)), registry)
    assert registry.get_sample_value(NAME, {"usage": "link"}) == expiry_of(link)
    assert registry.get_sample_value(NAME, {"usage": "tls"}) == expiry_of(tls)
    authority.issue("gateway", days=90)
    assert registry.get_sample_value(NAME, {"usage": "tls"}) == expiry_of(tls)


def test_the_earliest_expiry_of_a_chain_counts_and_an_invalid_file_changes_nothing(tmp_path: Path) -> None:
    authority, registry = Authority(tmp_path), CollectorRegistry()
    chain = authority.issue("gateway", days=90)[0]
    chain.write_bytes(chain.read_bytes() + authority.ca.read_bytes())
    show_certificates(SimpleNamespace(tls_certificate=str(chain)), registry)
    first = expiry_of(authority.ca)
    assert registry.get_sample_value(NAME, {"usage": "tls"}) == first
    chain.write_text("being written")
    assert registry.get_sample_value(NAME, {"usage": "tls"}) == first


def test_without_certificates_no_expiry_is_exported() -> None:
    registry = CollectorRegistry()
    show_certificates(SimpleNamespace(tls_certificate=""), registry)
    assert list(registry.collect()) == []
