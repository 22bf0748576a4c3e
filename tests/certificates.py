"""A certificate authority for tests."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates; its own is in the file `ca`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        builder = self._builder(self._name, self._key, 1).add_extension(x509.BasicConstraints(True, None), True)
        self._write(self.ca, builder.sign(self._key, hashes.SHA256()))

    def issue(
        self, name: str, *, host: str = "localhost", days: float = 1, address: str = "127.0.0.1"
    ) -> tuple[Path, Path]:
        """Write a certificate for `address` and `host`, and its key, over earlier ones of this name.

        It expires after `days`; with negative days it has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address(address))]
        builder = self._builder(_name(name), key, days).add_extension(x509.SubjectAlternativeName(names), False)
        paths = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        encoding, form, none = (
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        new = self._folder / "new.key"
        new.write_bytes(key.private_bytes(encoding, form, none))
        new.replace(paths[1])
        self._write(paths[0], builder.sign(self._key, hashes.SHA256()))
        return paths

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=30))
            .not_valid_after(now + timedelta(days=days))
        )

    def _write(self, path: Path, certificate: x509.Certificate) -> None:
        new = self._folder / "new.pem"
        new.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        new.replace(path)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
