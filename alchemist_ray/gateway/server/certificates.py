"""The gateway's certificate: given, or generated once and kept."""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from alchemist_ray.errors import AuthError

FOLDER = "~/.config/alchemist/gateway"
YEARS = 10


def certificate(certfile: str | None, keyfile: str | None) -> tuple[Path, Path]:
    """Files of the certificate and its key: those given, or of a self-signed certificate.

    Raises `AuthError` if only one is given.
    """
    if (certfile is None) != (keyfile is None):
        raise AuthError("a certificate needs its key: give both certfile and keyfile")
    if certfile is not None and keyfile is not None:
        return Path(certfile).expanduser(), Path(keyfile).expanduser()
    folder = Path(FOLDER).expanduser()
    cert, key = folder / "certificate.pem", folder / "key.pem"
    if not (cert.exists() and key.exists()):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _generate(cert, key)
    return cert, key


def _generate(cert: Path, key: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    host = socket.gethostname()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "alchemist gateway")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(host), x509.DNSName("localhost")]),
            critical=False,
        )
        .sign(private, hashes.SHA256())
    )
    pem = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for path, content in ((key, pem), (cert, made.public_bytes(serialization.Encoding.PEM))):
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(content)
        new.rename(path)


def server_context(cert: Path, key: Path) -> tuple[ssl.SSLContext, bytes]:
    """The context for accepted connections, and the SHA-256 of the certificate.

    Raises `AuthError` if the files are not a valid certificate and key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nothing but answers makes a client's socket readable
    try:
        context.load_cert_chain(cert, key)
        first = cert.read_text().partition("-----END CERTIFICATE-----")
        der = ssl.PEM_cert_to_DER_cert(first[0][first[0].index("-----BEGIN") :] + first[1] + "\n")
    except (OSError, ValueError) as error:
        raise AuthError(f"{cert} and {key} are not a valid certificate and key: {error}") from None
    return context, hashlib.sha256(der).digest()
