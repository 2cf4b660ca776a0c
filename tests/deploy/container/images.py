"""The project's image, built from the Containerfile of this tree; for tests that run it.

    image_tar()     docker archive, for `ctr images import`: it is named `REFERENCE` there
    image_root()    its files, unpacked, for `ch-run`; to be read only
    built()         its name in the store, for podman
    bare()          the name of a Debian with Python, and nothing else that minbase lacks
    in_store(...)   a command line of podman or buildah on the store that holds it, as `NAME`
    why_not()       why it cannot be built here, or None
    clean()         remove all of it; so does `python -m tests.deploy.container.images clean`

The first three build what is not there or not of today's files: minutes the first time, seconds
after a change in the project's own files, none without one. Any number of processes may ask.
All lies below ~/.cache/alchemist-on-ray/container: nothing in the machine's own stores.
Raises `RuntimeError` with what the tool said if a step fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from alchemist_ray import __version__
from tests.support import commands

NAME = f"alchemist-on-ray:{__version__}"  # as the manifests below kuberay/ have it
REFERENCE = f"docker.io/library/{NAME}"  # the same, as containerd wants it
TREE = Path(__file__).resolve().parents[3]
TOOLS = ("mmdebstrap", "buildah", "podman", "runc")
PACKAGES = "apt-get install -y --no-install-recommends mmdebstrap buildah podman runc charliecloud"
COPIED = ("Containerfile", ".containerignore", "kuberay/hashes.txt", "pyproject.toml", "README.md",
          "LICENSE", "ali", "alchemist_ray", "cray", "envs", "mpi_workers")  # fmt: skip
# debian:bookworm-slim, nearly: it has no documentation and no translations either.
LEFT_OUT = ("/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*/LC_MESSAGES/*",
            "/usr/share/doc/*")  # fmt: skip
BASE = ("mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates",
        *(f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT),
        "--dpkgopt=path-include=/usr/share/doc/*/copyright", "bookworm")  # fmt: skip
BUILD_LIMIT_S = 1500.0
IN_USE_S = 1200.0
LAYERS = 300  # with more of them in the store, it is rebuilt


def why_not() -> str | None:
    """Why the image cannot be built here, or None."""
    if os.geteuid() != 0:
        return "building the image needs root"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    return f"no {', '.join(missing)} on this machine; as root: {PACKAGES}" if missing else None


def folder() -> Path:
    """Where all of it lies."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "alchemist-on-ray" / "container"


def in_store(tool: str, *words: Any) -> list[str]:
    """A command line of podman or buildah on this store."""
    store = [f"--root={folder() / 'store'}", f"--runroot={folder() / 'run'}"]
    runtime = ["--runtime=runc"] if tool == "podman" else []
    return [tool, *store, *runtime, *map(str, words)]


def built() -> str:
    """The image's name in the store."""
    with _alone():
        _build(digest())
    return NAME


def bare() -> str:
    """The name in the store of a Debian with python3-venv, without compiler, git and make."""
    with _alone():
        return _base("python3-venv")


def image_tar() -> Path:
    """The image as a docker archive (about 1 GB)."""

    def push(new: Path) -> None:
        _run(*in_store("buildah", "push", NAME, f"docker-archive:{new}:{REFERENCE}"))

    return _made("tar", push)


def image_root() -> Path:
    """The image's files, unpacked (about 1 GB)."""

    def copy(new: Path) -> None:
        container = _run(*in_store("buildah", "from", NAME))
        try:
            mounted = _run(*in_store("buildah", "mount", container))
            _run("cp", "--archive", mounted, new)
        finally:
            _run(*in_store("buildah", "rm", container))

    return _made("root", copy)


def _made(kind: str, make: Callable[[Path], None]) -> Path:
    """The image of today's files in this form, made if it is not there."""
    key = digest()
    with _alone():
        path = folder() / f"{key}.{kind}"
        if not path.exists():
            _build(key)
            _forget(f"*.{kind}", f"*.{kind}.new")
            new = path.with_suffix(f".{kind}.new")
            make(new)
            new.rename(path)
        return path


def digest() -> str:
    """The files that the image is made of."""
    made_of = hashlib.sha256(repr((BASE, COPIED)).encode())
    for path in _files():
        made_of.update(f"{path.relative_to(TREE)} {path.stat().st_mode & 0o111}\0".encode())
        made_of.update(path.read_bytes())
    return made_of.hexdigest()[:16]


def clean() -> None:
    """Remove the image, its base, and all that building it has left."""
    if folder().is_dir():
        with _alone():
            _wipe_store()
        shutil.rmtree(folder())


def _files() -> list[Path]:
    found = [TREE / name for name in COPIED]
    inside = [path for top in found if top.is_dir() for path in top.rglob("*") if path.is_file()]
    files = [path for path in found if path.is_file()] + inside
    return sorted(path for path in files if "__pycache__" not in path.parts)


def _build(key: str) -> None:
    """Have `NAME` in the store, made of what `key` says."""
    faulthandler.cancel_dump_traceback_later()  # this is what takes so long: pytest's timer
    label = "org.alchemist.digest"
    form = f"{{{{index .Docker.config.Labels {label!r}}}}}".replace("'", '"')
    with contextlib.suppress(RuntimeError):
        if _run(*in_store("buildah", "inspect", "--type=image", "--format", form, NAME)) == key:
            return
    if len(list((folder() / "store" / "overlay-images").glob("*"))) > LAYERS:
        _wipe_store()
    # A proxy that signs what it lets through: its certificate is lent to the build, not kept.
    certificates = os.environ.get("SSL_CERT_FILE")
    lent = [f"--secret=id=ca,src={certificates}"] if certificates else []
    _run(
        *in_store("buildah", "bud", "--isolation=chroot", "--layers", f"--tag={NAME}"),
        *(f"--build-arg={word}" for word in (f"BASE={_base()}", f"VERSION={__version__}")),
        f"--label={label}={key}",
        *lent,
        TREE,
    )


def _base(*packages: str) -> str:
    """The name of a Debian in the store."""
    made = (*BASE[:1], *(f"--include={name}" for name in packages), *BASE[1:])
    name = f"localhost/debian-slim:{hashlib.sha256(repr(made).encode()).hexdigest()[:16]}"
    with contextlib.suppress(RuntimeError):
        _run(*in_store("buildah", "inspect", "--type=image", name))
        return name
    tar = folder() / "base.tar"
    _run(*made, tar)
    _run(*in_store("podman", "import", tar, name))
    tar.unlink()
    return name


def _wipe_store() -> None:
    if (folder() / "store").is_dir():
        _run(*in_store("buildah", "rm", "--all"))
        _run(*in_store("buildah", "rmi", "--all", "--force"))


def _forget(*patterns: str) -> None:
    """Remove what was made of earlier files, unless another process may be reading it."""
    for path in (path for pattern in patterns for path in folder().glob(pattern)):
        if time.time() - path.stat().st_ctime > IN_USE_S:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _alone() -> FileLock:
    """One process at a time."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    return FileLock(folder() / "lock", timeout=BUILD_LIMIT_S)


def _run(*command: Any) -> str:
    """Run a command to its end; what it printed."""
    (folder() / "tmp").mkdir(exist_ok=True)
    place = str(folder() / "tmp")  # what RUN keeps between builds, too
    return commands.output(*command, limit_s=BUILD_LIMIT_S, TMPDIR=place).strip()


if __name__ == "__main__":
    if sys.argv[1:] == ["clean"]:
        clean()
    else:
        print(image_tar(), image_root(), sep="\n")
