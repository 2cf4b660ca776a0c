"""Kubernetes and what belongs to it, built from Go modules and kept outside the repository.

    python -m tests.kube.binaries      # build what is missing (minutes), and say where it is

What is built is named for what it is built of (a digest of our Go files, or a module's version),
so that a change causes a build and no file is stale.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.kuberay.folders import KUBERAY_VERSION
from tests.support import commands

SOURCE = Path(__file__).parent / "controlplane"
CACHE = Path.home() / ".cache" / "alchemist-on-ray" / "kube"
KUBERNETES = "v1.34.4"  # as controlplane/go.mod replaces it
COSCHEDULING = "sigs.k8s.io/scheduler-plugins@v0.34.7"  # as controlplane/go.mod requires it
KUBERAY = f"github.com/ray-project/kuberay/ray-operator@v{KUBERAY_VERSION}"
COREDNS = "github.com/coredns/coredns@v1.12.4"
HELM = "helm.sh/helm/v3@v3.16.4"
KWOK = "sigs.k8s.io/kwok@v0.7.0"
LIMIT_S = 3600.0  # a control plane takes 4 to 18 minutes here
STAMP = "k8s.io/component-base/version"
LINKED = f"-s -w -X {STAMP}.gitVersion={KUBERNETES} -X {STAMP}.gitMajor=1 -X {STAMP}.gitMinor=34"


@dataclass(frozen=True, slots=True)
class Part:
    """One folder of the cache: what makes it, and its name, which says what it is made of."""

    name: str
    version: str
    make: Callable[[Path], None]

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.name}-{self.version}"

    @property
    def there(self) -> bool:
        return self.folder.exists()

    def get(self) -> Path:
        """The folder, made if it is not there. Raises `RuntimeError` with what Go says."""
        with _locked(self.name):
            if not self.there:
                start = time.monotonic()
                made = Path(tempfile.mkdtemp(prefix=f".{self.name}-", dir=CACHE))
                try:
                    self.make(made)
                    seconds = round(time.monotonic() - start)
                    (made / "built.json").write_text(json.dumps({"seconds": seconds}))
                    made.chmod(0o755)
                    made.rename(self.folder)
                finally:
                    shutil.rmtree(made, ignore_errors=True)
        return self.folder

    @property
    def seconds(self) -> int:
        """How long it took to build, when it was."""
        return json.loads((self.folder / "built.json").read_text())["seconds"]


@contextmanager
def _locked(name: str) -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _go(*words: str, **environment: str) -> str:
    return commands.output("go", *words, cwd=SOURCE, limit_s=LIMIT_S, **environment)


def _module(module: str) -> Path:
    """A module's folder, fetched if need be."""
    return Path(json.loads(_go("mod", "download", "-json", module, GOFLAGS="-mod=mod"))["Dir"])


def _build(program: Path, module: str, package: str) -> None:
    """A module's program, by its own go.mod: all that Go then asks for has a fixed version."""
    words = ("build", "-C", str(_module(module)), "-mod=readonly", "-buildvcs=false", "-trimpath")
    _go(*words, "-ldflags=-s -w", "-o", str(program), package, CGO_ENABLED="0")


def _manifests(folder: Path, module: str, *below: str) -> None:
    """A module's manifests, put into ``manifests/``."""
    (folder / "manifests").mkdir(exist_ok=True)
    for pattern in below:
        found = sorted(_module(module).glob(pattern))
        if not found:
            raise RuntimeError(f"{module} has no {pattern}")
        for path in found:
            shutil.copyfile(path, folder / "manifests" / path.name)


def _make_control_plane(folder: Path) -> None:
    words = ("build", "-trimpath", "-buildvcs=false")
    _go(*words, f"-ldflags={LINKED}", "-o", f"{folder}/controlplane", ".")
    _go(*words, "-ldflags=-s -w", "-o", f"{folder}/pause", "./pause", CGO_ENABLED="0")
    _manifests(folder, COSCHEDULING, "manifests/coscheduling/crd.yaml")


def _make_operator(folder: Path) -> None:
    _build(folder / "ray-operator", KUBERAY, ".")
    _manifests(folder, KUBERAY, "config/crd/bases/*.yaml")


def _program(name: str, module: str, package: str = ".") -> Part:
    """The part that is one program of a module."""
    version = module.partition("@")[2]
    return Part(name, version, lambda folder: _build(folder / name, module, package))


def _digest() -> str:
    """Of all that decides what our own program is."""
    text = hashlib.sha256(LINKED.encode())
    for path in sorted(SOURCE.rglob("*")):
        if path.suffix in (".go", ".mod", ".sum"):
            text.update(path.name.encode() + path.read_bytes())
    return text.hexdigest()[:12]


CONTROL_PLANE = Part("controlplane", _digest(), _make_control_plane)
OPERATOR = Part("ray-operator", KUBERAY.partition("@")[2], _make_operator)
DNS = _program("coredns", COREDNS)
FAKES = _program("kwok", KWOK, "./cmd/kwok")
PACKAGES = _program("helm", HELM, "./cmd/helm")
ALL = (CONTROL_PLANE, OPERATOR, DNS, FAKES, PACKAGES)


if __name__ == "__main__":
    for part in ALL:
        print(part.get(), f"{part.seconds} s", flush=True)
