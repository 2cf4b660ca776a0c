"""Tokens, the commands of a gang that each allows, the audit log, and the gateway's certificate.

The file of tokens has users, groups, scopes, expiry, quotas, and the verifier of each secret.

It has mode 600. A gateway reads it again when it has changed, so that a token that is
created or revoked counts at once.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from alchemist_ray.errors import AuthError, BadArgumentError
from alchemist_ray.gateway.protocol import SCOPES, Verifier, new_token
from alchemist_ray.private_files import write_private
from mpi_workers.failures import Failure
from mpi_workers.protocol.commands import COMMANDS, Turn
from mpi_workers.protocol.libraries import ARRAYS, ENTRY_POINTS, SHIPPED
from mpi_workers.wire.frames import Body

FILE_VARIABLE = "ALCHEMIST_TOKENS"
FILE = "~/.config/alchemist/tokens.json"
AUDIT = "~/.config/alchemist/gateway/audit.log"
FORMAT = 1
DAYS = 90.0  # until a token expires, unless something else is said
MOST_DAYS = 36_500  # of one that expires
LOCK_TIMEOUT_S, LOCK_INTERVAL_S = 10.0, 0.02


@dataclass(frozen=True, slots=True)
class Token:
    """A token, without its secret.

    Attributes
    ----------
    id, user : str
    scopes : tuple of str
        Of `SCOPES`.
    expires : float or None
        Unix time.
    ranks, gangs, nbytes : int or None
        Quotas of the user: ranks and gangs at a time, bytes of all matrices. None: no limit. Of
        several tokens of a user the smallest quota counts, see `TokenFile.quota`.
    groups : tuple of str
        Their members may change each other's named gangs.
    """

    id: str
    user: str
    scopes: tuple[str, ...]
    expires: float | None = None
    ranks: int | None = None
    gangs: int | None = None
    nbytes: int | None = None
    groups: tuple[str, ...] = ()

    @property
    def expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires

    def allows(self, scope: str) -> bool:
        """Whether the token has a scope; ``admin`` includes all."""
        return scope in self.scopes or "admin" in self.scopes


class TokenFile:
    """The tokens in a file. Each method sees the file as it is now.

    Parameters
    ----------
    path : path_like, optional
        Default: ``ALCHEMIST_TOKENS``, else ``~/.config/alchemist/tokens.json``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path or os.environ.get(FILE_VARIABLE) or FILE).expanduser()
        self._stamp: tuple[int, int, int] | None = None
        self._entries: dict[str, dict[str, Any]] = {}

    def find(self, ident: str) -> tuple[Token, Verifier] | None:
        """A token and its verifier by id."""
        entry = self._read().get(ident)
        if entry is None:
            return None
        verifier = Verifier(*(bytes.fromhex(entry[name]) for name in Verifier.__slots__))
        return _token(ident, entry), verifier

    def check(self, ident: str) -> Token:
        """A token as it is now. Raises `Failure` if it was revoked, or has expired."""
        found = self.find(ident)
        if found is None or found[0].expired:
            words = f"token {ident} has expired or was revoked: ask for another one"
            raise Failure("AuthError", words)
        return found[0]

    def list(self) -> Sequence[Token]:
        """All tokens, expired ones as well."""
        return [_token(ident, entry) for ident, entry in self._read().items()]

    def of_user(self, user: str) -> Sequence[Token]:
        """A user's tokens that are valid."""
        return [token for token in self.list() if token.user == user and not token.expired]

    def quota(self, user: str, kind: str) -> int | None:
        """A user's quota of ranks, gangs or nbytes: the smallest one of his tokens."""
        given = (getattr(token, kind) for token in self.of_user(user))
        return min((most for most in given if most is not None), default=None)

    def create(
        self,
        user: str,
        scopes: Sequence[str] = ("call",),
        *,
        groups: Sequence[str] = (),
        days: float | None = DAYS,
        ranks: int | None = None,
        gangs: int | None = None,
        nbytes: int | None = None,
    ) -> str:
        """A new token; its text is stored nowhere. `days` None: it does not expire.

        Raises `BadArgumentError`.
        """
        for what, name in (("user", user), *(("group", group) for group in groups)):
            if not name or len(name) > 64 or not all(c.isalnum() or c in "._-@" for c in name):
                raise BadArgumentError(
                    f"{what} {name!r}: 1 to 64 letters, digits, '.', '_', '-' and '@' are allowed"
                )
        if unknown := [scope for scope in scopes if scope not in SCOPES]:
            raise BadArgumentError(f"unknown scope {unknown[0]!r}; scopes: {', '.join(SCOPES)}")
        if not {"call", "admin"} & set(scopes):
            raise BadArgumentError(
                f"scopes {', '.join(scopes) or '(none)'} allow nothing without 'call': add it"
            )
        if days is not None and not 0 < days <= MOST_DAYS:
            raise BadArgumentError(
                f"days must be greater than 0, and at most {MOST_DAYS:,}; got {days:g}"
            )
        for name, most in (("ranks", ranks), ("gangs", gangs), ("bytes", nbytes)):
            if most is not None and most < 0:
                raise BadArgumentError(f"{name} must not be negative; got {most}")
        text, ident, verifier = new_token()
        expires = None if days is None else time.time() + 86400 * days
        token = Token(ident, user, tuple(scopes), expires, ranks, gangs, nbytes, tuple(groups))
        facts = {key: value for key, value in asdict(token).items() if key != "id"}
        keys = {key: value.hex() for key, value in asdict(verifier).items()}
        with self._changing() as entries:
            entries[ident] = {**facts, **keys}
        return text

    def revoke(self, ident: str) -> Token:
        """Remove a token. Raises `AuthError` if no token has this id."""
        with self._changing() as entries:
            if ident not in entries:
                own = [key for key, facts in entries.items() if facts["user"] == ident]
                hint = f"; those of user {ident} are {', '.join(own)}" if own else ""
                raise AuthError(f"there is no token {ident!r} in {self.path}{hint}")
            return _token(ident, entries.pop(ident))

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise AuthError(f"{self.path} cannot be read: {error}") from None
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp != self._stamp:
            check_private(self.path, found)
            try:
                content = json.loads(self.path.read_text())
                if content["format"] != FORMAT:
                    raise ValueError(f"format {content['format']}")
                self._entries = content["tokens"]
            except (ValueError, KeyError, TypeError) as error:
                raise AuthError(f"{self.path} is not a file of tokens: {error}") from None
            except OSError as error:
                raise AuthError(f"{self.path} cannot be read: {error}") from None
            self._stamp = stamp
        return self._entries

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, dict[str, Any]]]:
        """The entries, written when the caller has changed them; one process at a time.

        Otherwise a token that is being created could bring back one that is revoked meanwhile.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(f"{self.path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with open(fd) as lock:
            while not _locked(lock):
                if time.monotonic() > deadline:
                    raise AuthError(
                        f"{self.path}.lock has been held by another process for "
                        f"{LOCK_TIMEOUT_S:g} s: end the command that changes tokens, and try again"
                    )
                time.sleep(LOCK_INTERVAL_S)
            entries = dict(self._read())
            yield entries
            content = json.dumps({"format": FORMAT, "tokens": entries}, indent=1)
            write_private(self.path, content.encode())


def _locked(file: IO[str]) -> bool:
    """Lock a file; False if another process holds the lock."""
    with contextlib.suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _token(ident: str, entry: dict[str, Any]) -> Token:
    facts = {name: entry.get(name) for name in ("expires", "ranks", "gangs", "nbytes")}
    return Token(
        ident, entry["user"], tuple(entry["scopes"]), **facts, groups=tuple(entry.get("groups", ()))
    )


def check_private(path: Path, found: os.stat_result) -> None:
    """Raise `AuthError` if others can read a file with secrets."""
    # A Secret of Kubernetes belongs to root, and is readable by the group of the pod.
    others = 0o007 if found.st_uid == 0 != os.geteuid() else 0o077
    if found.st_mode & others or found.st_uid not in (0, os.geteuid()):
        raise AuthError(
            f"{path} must belong to this user and be readable by nobody else: chmod 600 {path}"
        )


# --- rights ---

READ_ONLY = (
    "this gang was started by another user: you may read its matrices, not change anything. Those "
    "who share a group with its owner may (`alchemist token create --groups ...`)"
)
# Scopes that shipped libraries need besides `call`, and the reason.
NEEDED = {
    "files": ("files", "load_matrix, save and checkpoints use the server's files"),
    "simulator": ("run_code", "the library 'simulator' loads simulators from the server's files"),
    "program": ("run_code", "the library 'program' starts programs"),
}
CLUSTER = "cluster"  # group whose members may change gangs that were started inside the cluster


def may_change(token: Token, user: str, tokens: TokenFile) -> bool:
    """Whether a token may change a named gang, or only read it.

    Parameters
    ----------
    token : Token
    user : str
        Who has started the gang; empty if it was started inside the cluster.
    tokens : TokenFile
        Names the groups of `user`.
    """
    if token.user == user or token.allows("admin"):
        return True
    if not user:  # code on any gang can do as much
        return token.allows("run_code") or CLUSTER in token.groups
    return bool(token.groups) and any(
        set(token.groups) & set(other.groups) for other in tokens.of_user(user)
    )


def check(token: Token, body: Body, *, own: bool, changes: bool = True) -> None:
    """Raise `Failure` (AuthError) if a token does not allow a command.

    Parameters
    ----------
    token : Token
    body : dict
        The command.
    own : bool
        Whether the token's user has started the gang.
    changes : bool
        Whether he may change it; see `may_change`.
    """
    op = body.get("op")
    command = COMMANDS.get(op) if isinstance(op, str) else None
    scope = None if command is None else command.scope
    if scope is None:
        raise Failure("AuthError", f"a gateway does not pass on the command {op!r}")
    if scope:
        why = dict(NEEDED.values()).get(scope, "") if scope == "files" else ""
        require(token, scope, why or f"{op!r} runs your own code on the ranks")
    if not changes and _changes(body):
        raise Failure("AuthError", READ_ONLY)
    match op:
        case "load":
            _check_load(token, body.get("library"), body.get("path"))
        case "call":
            _check_shipped(token, body.get("library"))
        case "submit":
            submitted = body.get("command")
            check(token, submitted if isinstance(submitted, dict) else {}, own=own)
        case "cancel_calls" if body.get("all") and not own:
            require(token, "admin", "cancelling the calls of everyone on another user's gang")


def _changes(body: Body) -> bool:
    op = body["op"]
    extended = op == "describe" and not body.keys() <= {"op", "id", "matrix", "output"}
    return COMMANDS[op].turn in (Turn.QUEUED, Turn.STORE) or op == "pin" or extended


def _check_load(token: Token, name: object, path: object) -> None:
    if path is not None:
        require(token, "run_code", f"the library is loaded from the server's file {path}")
    elif name in SHIPPED or name == ARRAYS:
        _check_shipped(token, name)
    elif name not in entry_points(group=ENTRY_POINTS).names:
        require(token, "run_code", f"{name!r} is neither shipped nor installed as a library")


def _check_shipped(token: Token, name: object) -> None:
    if (needed := NEEDED.get(str(name))) is not None:
        require(token, *needed)


def require(token: Token, scope: str, why: str) -> None:
    if not token.allows(scope):
        raise Failure(
            "AuthError",
            f"{why}: this requires a token with the scope {scope!r}; this token has: "
            f"{', '.join(token.scopes)}. Create one with `alchemist token create --scopes ...`",
        )


# --- the audit log ---

MOST = 1000  # characters of a fact: clients choose some of them, in messages of up to 16 MiB


def bounded(fact: Any) -> Any:
    """A fact as it is, or the beginning of its text if that is long."""
    text = fact if isinstance(fact, str) else repr(fact)
    return fact if len(text) <= MOST else text[:MOST]


class Audit:
    """Appends to a file of mode 600. Thread-safe; a full disk does not end the gateway.

    Parameters
    ----------
    path : path_like, optional
        Default: ``~/.config/alchemist/gateway/audit.log``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path or AUDIT).expanduser()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
        self._file = open(fd, "a", buffering=1)  # noqa: SIM115 - until `close`
        self._lock = threading.Lock()
        self._failed = False

    def write(self, event: str, **facts: Any) -> None:
        """One line: the time (UTC), the event, and its facts that are not None."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        given = {key: bounded(value) for key, value in facts.items() if value is not None}
        entry = {"time": now, "event": bounded(event), **given}
        line = json.dumps(entry, default=str, skipkeys=True)
        try:
            with self._lock:
                self._file.write(line + "\n")
                self._failed = False
        except (OSError, ValueError) as error:
            if not self._failed:
                self._failed = True
                sys.stderr.write(f"alchemist gateway: {self.path} cannot be written: {error}\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()


# --- the certificate: given, or generated once and kept ---

FOLDER = "~/.config/alchemist/gateway"
YEARS = 2
POLL_INTERVAL_S = 1.0  # between two looks at the files


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
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(key, pem)
    write_private(cert, made.public_bytes(serialization.Encoding.PEM))


class Identity:
    """The certificate of a gateway, read again when its file has changed.

    Parameters
    ----------
    cert, key : Path
    failed : callable(str)
        Called when a changed file cannot be used: then the one before stays.

    """

    def __init__(self, cert: Path, key: Path, failed: Callable[[str], None]) -> None:
        self._files = cert, key
        self._failed = failed
        self._stamp = self._stamped()
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self._found = self._read()

    def look(self) -> tuple[ssl.SSLContext, bytes, datetime.datetime]:
        """The context for accepted connections; the certificate's SHA-256; when it expires."""
        with self._lock:
            if time.monotonic() > self._looked + POLL_INTERVAL_S:
                self._looked = time.monotonic()
                if (stamp := self._stamped()) != self._stamp:
                    self._stamp = stamp
                    try:
                        self._found = self._read()
                    except AuthError as error:
                        self._failed(str(error))
            return self._found

    def _stamped(self) -> object:
        with contextlib.suppress(OSError):
            return [(found.st_mtime_ns, found.st_ino) for found in map(os.stat, self._files)]
        return None

    def _read(self) -> tuple[ssl.SSLContext, bytes, datetime.datetime]:
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
        return context, first.fingerprint(hashes.SHA256()), first.not_valid_after_utc
