"""The gateway's certificate: given, or generated once and kept."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from alchemist_ray.errors import AuthError
from alchemist_ray.gateway.server.access import check_private

FOLDER = "~/.config/alchemist/gateway"
YEARS = 10
LOOK_S = 1.0  # between two looks at the files


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


class Identity:
    """The certificate of a gateway, read again when its file has changed.

    Parameters
    ----------
    cert, key : Path
    failed : callable(str)
        Called when a changed file cannot be used: then the one before stays.

    Attributes
    ----------
    context : SSLContext
        For accepted connections.
    digest : bytes
        SHA-256 of the certificate.
    expires : datetime
    """

    def __init__(self, cert: Path, key: Path, failed: Callable[[str], None]) -> None:
        self._files = cert, key
        self._failed = failed
        self._stamp = self._stamped()
        self._looked = time.monotonic()
        self._read()

    def look(self) -> Identity:
        """Read the files again if they have changed; itself."""
        if time.monotonic() > self._looked + LOOK_S:
            self._looked = time.monotonic()
            if (stamp := self._stamped()) != self._stamp:
                self._stamp = stamp
                try:
                    self._read()
                except AuthError as error:
                    self._failed(str(error))
        return self

    def _stamped(self) -> object:
        with contextlib.suppress(OSError):
            return [(found.st_mtime_ns, found.st_ino) for found in map(os.stat, self._files)]
        return None

    def _read(self) -> None:
        """Raises `AuthError` if the files are not a certificate that is valid now, and its key."""
        cert, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # nothing but answers makes a client's socket readable
        try:
            check_private(key, key.stat())
            context.load_cert_chain(cert, key)
            first = x509.load_pem_x509_certificate(cert.read_bytes())
        except (OSError, ValueError) as error:
            words = f"{cert} and {key} are not a valid certificate and key: {error}"
            raise AuthError(words) from None
        if datetime.datetime.now(datetime.UTC) >= first.not_valid_after_utc:
            raise AuthError(f"{cert} expired on {first.not_valid_after_utc:%Y-%m-%d}: renew it")
        self.context, self.digest = context, first.fingerprint(hashes.SHA256())
        self.expires = first.not_valid_after_utc
