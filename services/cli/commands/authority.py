"""A certificate authority in a folder, and the certificates that it issues to services. Needs `cryptography`.

    FOLDER/authority/certificate.pem, key.pem     the authority; its key only signs and is mounted nowhere
    FOLDER/SERVICE/certificate.pem, key.pem       the identity of a service, as server and as client
    FOLDER/SERVICE/ca.pem                         the trusted authority's certificate

Files are replaced as wholes, so that services that read them again never find half of one.
"""

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.runtime.settings import InvalidSetting

AUTHORITY = "authority"
_CERTIFICATE, _KEY, _CA = "certificate.pem", "key.pem", "ca.pem"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_AUTHORITY_DAYS = 3650
# Clocks differ: new certificates are valid for clocks that are behind, too.
_EARLIER = timedelta(hours=1)
# Of DNS, perhaps a wildcard.
_HOST = re.compile(r"(\*\.)?[a-zA-Z0-9_]([\w-]{0,61}\w)?(\.[a-zA-Z0-9_]([\w-]{0,61}\w)?)*\.?", re.ASCII)
_SERVICE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Issued:
    """A written certificate: its subject, and when it expires."""

    service: str
    ends: datetime


class Authority:
    """The authority of a folder, and the certificates in it."""

    def __init__(self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        """Take a certificate and its key; use `open_authority` or `make_authority`."""
        self._folder = folder
        self._certificate = certificate
        self._key = key

    def services(self) -> list[str]:
        """Return the services that have a certificate, sorted."""
        return sorted(
            path.parent.name for path in self._folder.glob(f"*/{_CERTIFICATE}") if path.parent.name != AUTHORITY
        )

    def ends(self, service: str) -> datetime:
        """Return when a service's certificate expires. Raises InvalidSetting if it cannot be read."""
        return _read(self._folder / service / _CERTIFICATE).not_valid_after_utc

    def issue(self, service: str, hosts: Sequence[str], days: float, now: datetime) -> Issued:
        """Write a certificate for a service under its name, this machine's, and further hosts: names or addresses.

        It expires after `days`, or with the authority. An existing one is replaced.
        """
        names = [_general_name(host) for host in dict.fromkeys((service, *_LOCAL, *hosts))]
        return self._sign(service, x509.SubjectAlternativeName(names), days, now)

    def renew(self, service: str, days: float, now: datetime) -> Issued:
        """Replace a service's certificate by one with the same names. Raises InvalidSetting if it cannot be read."""
        before = _read(self._folder / service / _CERTIFICATE)
        names = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return self._sign(service, names, days, now)

    def _sign(self, service: str, names: x509.SubjectAlternativeName, days: float, now: datetime) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        ends = min(now + timedelta(days=days), self._certificate.not_valid_after_utc)
        both_sides = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _begin(_name(service), self._certificate.subject, key.public_key(), now, ends)
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(both_sides, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        folder = self._folder / service
        _write_pair(folder, certificate, key)
        _replace(folder / _CA, _pem(self._certificate), 0o644)
        return Issued(service, certificate.not_valid_after_utc)


def make_authority(folder: Path, now: datetime) -> Authority:
    """Create an authority and its folder. Raises InvalidSetting if the folder holds certificates."""
    found = next(iter(sorted([*folder.glob(f"*/{_CERTIFICATE}"), *folder.glob(f"*/{_KEY}")])), None)
    if found:
        raise InvalidSetting(f"{found} exists already and is not overwritten")
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Quire's authority")
    certificate = (
        _begin(name, name, key.public_key(), now, now + timedelta(days=_AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_only(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_pair(folder / AUTHORITY, certificate, key)
    return Authority(folder, certificate, key)


def open_authority(folder: Path) -> Authority:
    """Return the authority of a folder. Raises InvalidSetting if it cannot be read."""
    path = folder / AUTHORITY / _KEY
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidSetting(f"{path} cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidSetting(f"{path} is no key that `quire certificates create` made")
    return Authority(folder, _read(folder / AUTHORITY / _CERTIFICATE), key)


def create(
    folder: Path, services: Sequence[str], hosts: Mapping[str, Sequence[str]], days: float, *, keep: bool
) -> Iterator[Issued]:
    """Create an authority in a folder, and a certificate for each service, with further names from `hosts`.

    `keep`: where there is an authority, use it, renew what ends in 30 days, and make what is missing. Raises
    InvalidSetting.
    """
    for service in services:
        _check_service(service)
        for host in hosts.get(service, []):
            _general_name(host)
    there = all((folder / AUTHORITY / file).exists() for file in (_KEY, _CERTIFICATE))
    authority = open_authority(folder) if keep and there else make_authority(folder, now())
    if keep:
        yield from renew(authority, days, within_days=30)
    issued = authority.services()
    for service in services:
        if service not in issued:
            yield authority.issue(service, hosts.get(service, []), days, now())


def renew(authority: Authority, days: float, within_days: float | None) -> Iterator[Issued]:
    """Renew the certificates that expire within `days`; None: all. Raises InvalidSetting if one cannot be read."""
    for service in authority.services():
        if within_days is None or authority.ends(service) <= now() + timedelta(days=within_days):
            yield authority.renew(service, days, now())


def _check_service(service: str) -> None:
    """Raise InvalidSetting for a name that cannot be a folder and a host."""
    if service == AUTHORITY or not _SERVICE.fullmatch(service):
        raise InvalidSetting(
            f"service is {service!r}, it must be lowercase letters, digits and dashes, not {AUTHORITY!r}"
        )


def _begin(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(ends)
    )


def _signs_only() -> x509.KeyUsage:
    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    more = ("encipher_only", "decipher_only")
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **dict.fromkeys((*others, *more), False))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        name = host.encode("idna").decode()
    except UnicodeError as error:
        raise InvalidSetting(f"host is {host!r}, it must be a name or an address: {error}") from error
    if not _HOST.fullmatch(name):
        raise InvalidSetting(f"host is {host!r}, it must be a name or an address")
    return x509.DNSName(name)


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{path} cannot be read: {error}") from error


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_pair(folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _replace(folder / _KEY, secret, 0o600)
    _replace(folder / _CERTIFICATE, _pem(certificate), 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Write a temporary file with the final permissions, and rename it."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), mode)
    new.replace(path)


def now() -> datetime:
    """Return the time in whole seconds, the resolution of certificates."""
    return datetime.now(UTC).replace(microsecond=0)
