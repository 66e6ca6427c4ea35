"""Certificates for a upsd in tests: an authority of our own, and NSS folders as Debian's upsd wants them."""

import subprocess
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID

from tests.peers import require

NICKNAME = "upsd of the tests"


class Authority:
    """Signs certificates. pem: the file that a client believes."""

    def __init__(self, folder: Path, name: str = "authority of the tests") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        self._certificate = (
            _builder(self._name, self._name, self._key, days=30)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = folder / f"{name.replace(' ', '-')}.pem"
        self.pem.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def nss(self, *names: str, days: int = 7) -> tuple[Path, str]:
        """Make an NSS folder with a certificate for these names and addresses; days < 0: one that has expired."""
        database = self._folder / f"nss-{len(list(self._folder.iterdir()))}"
        database.mkdir()
        key, certificate = self._signed(names, days)
        bundle = database / "upsd.p12"
        bundle.write_bytes(
            pkcs12.serialize_key_and_certificates(
                NICKNAME.encode(), key, certificate, [self._certificate], serialization.NoEncryption()
            )
        )
        for argv in (
            (require("certutil"), "-N", "-d", str(database), "--empty-password"),
            (require("pk12util"), "-i", str(bundle), "-d", str(database), "-K", "", "-W", ""),
        ):
            ended = subprocess.run(argv, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, (argv, ended.stdout, ended.stderr)
        return database, NICKNAME

    def files(self, *names: str, days: int = 7) -> tuple[Path, Path]:
        """Make a certificate for these names and addresses; returns its file and that of its key."""
        key, certificate = self._signed(names, days)
        stem = self._folder / f"{names[0]}-{days}"
        cert_path, key_path = stem.with_suffix(".crt"), stem.with_suffix(".key")
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert_path, key_path

    def _signed(self, names: tuple[str, ...], days: int) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = [x509.IPAddress(ip_address(n)) if n[0].isdigit() else x509.DNSName(n) for n in names]
        certificate = (
            _builder(subject, self._name, key, days=days)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return key, certificate


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    begin, end = sorted((now - timedelta(days=60), now + timedelta(days=days)))
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )
