"""Which commands of a gang a token may send."""

from __future__ import annotations

from importlib.metadata import entry_points

from alchemist_ray.gateway.server.tokens import Token, TokenFile
from mpi_workers.failures import Failure
from mpi_workers.wire.commands import COMMANDS, Turn
from mpi_workers.wire.frames import Body
from mpi_workers.wire.library_names import ARRAYS, ENTRY_POINTS, SHIPPED

UPLOADS = frozenset({"stage", "collect", "read_part"})  # the gateway answers them itself
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
    scope = "run_code" if op in UPLOADS else None if command is None else command.scope
    if scope is None:
        raise Failure("AuthError", f"a gateway does not pass on the command {op!r}")
    if scope:
        _require(token, scope, f"{op!r} runs your own code on the ranks")
    if not changes and (op in UPLOADS or _changes(body)):
        raise Failure("AuthError", READ_ONLY)
    match op:
        case "load":
            _check_load(token, body.get("library"), body.get("path"))
        case "call":
            _check_shipped(token, body.get("library"))
        case "free" if body.get("forced"):
            raise Failure("AuthError", "a client of a gateway cannot free a matrix that others use")
        case "cancel_calls" if body.get("all") and not own:
            _require(token, "admin", "cancelling the calls of everyone on another user's gang")


def _changes(body: Body) -> bool:
    op = body["op"]
    extended = op == "describe" and not body.keys() <= {"op", "id", "matrix", "output"}
    return COMMANDS[op].turn is Turn.QUEUED or op in ("pin", "remove_files") or extended


def _check_load(token: Token, name: object, path: object) -> None:
    if path is not None:
        _require(token, "run_code", f"the library is loaded from the server's file {path}")
    elif name in SHIPPED or name == ARRAYS:
        _check_shipped(token, name)
    elif name not in entry_points(group=ENTRY_POINTS).names:
        _require(token, "run_code", f"{name!r} is neither shipped nor installed as a library")


def _check_shipped(token: Token, name: object) -> None:
    if (needed := NEEDED.get(str(name))) is not None:
        _require(token, *needed)


def _require(token: Token, scope: str, why: str) -> None:
    if not token.allows(scope):
        raise Failure(
            "AuthError",
            f"{why}: this requires a token with the scope {scope!r}; this token has: "
            f"{', '.join(token.scopes)}. Create one with `alchemist token create --scopes ...`",
        )
