"""Which commands of a gang a token may send."""

from __future__ import annotations

from importlib.metadata import entry_points

from alchemist_ray.gateway.server.tokens import Token
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

# Commands of `runtime.commands` and of the dispatcher. `discard` and `end_lease` are internal.
OPEN = frozenset(
    {"session", "goodbye", "begin_read", "end_read", "status", "cancel", "create", "seal",
     "redistribute", "release", "hold", "pin", "list_matrices", "describe", "touch", "resume",
     "sources", "list_libraries", "ping"}
)  # fmt: skip
CODE = frozenset({"run", "remove_files", "stage", "collect", "read_part"})
# Without `run_code` a client loads these, and libraries that are installed as entry points.
LIBRARIES = frozenset({"linalg", "scalapack", "elemental", "sparse", "echo", "ali.arrays"})
FILES = "files"
ENTRY_POINTS = "alchemist.libraries"


def check(token: Token, body: Body, *, own: bool) -> None:
    """Raise `Failure` (AuthError) if a token does not allow a command.

    Parameters
    ----------
    token : Token
    body : dict
        The command.
    own : bool
        Whether the token's user has started the gang.
    """
    op = body.get("op")
    if op in OPEN:
        return
    if op in CODE:
        _require(token, "run_code", f"{op!r} runs your own code on the ranks")
    elif op == "load":
        _check_load(token, body.get("library"), body.get("path"))
    elif op == "call":
        if body.get("library") == FILES:
            _require(token, "files", "load_matrix, save and checkpoints use the server's files")
    elif op == "free":
        if body.get("forced"):
            raise Failure("AuthError", "a client cannot force a free")
    elif op == "cancel_calls":
        if body.get("all") and not own:
            _require(token, "admin", "cancelling the calls of everyone on another user's gang")
    else:
        raise Failure("AuthError", f"a gateway does not pass on the command {op!r}")


def _check_load(token: Token, name: object, path: object) -> None:
    if path is not None:
        _require(token, "run_code", f"loading a library from the server's file {path}")
    elif name == FILES:
        _require(token, "files", "load_matrix, save and checkpoints use the server's files")
    elif name not in LIBRARIES and name not in entry_points(group=ENTRY_POINTS).names:
        _require(token, "run_code", f"loading the module {name!r}, which is not installed as a "
                 "library,")  # fmt: skip


def _require(token: Token, scope: str, what: str) -> None:
    if not token.allows(scope):
        raise Failure(
            "AuthError",
            f"{what}: that needs a token with the scope {scope!r}, and this one has "
            f"{', '.join(token.scopes)}. `alchemist token create --scopes ...` makes one",
        )
