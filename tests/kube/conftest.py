"""One Kubernetes for all tests here. They run only where this folder is named: `make test-kube`.

The tests follow each other on it, each with a cluster of Ray's in a namespace of its own, which
it takes away again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.container import images
from tests.kube import binaries, needs
from tests.kube.cluster import Cluster
from tests.kube.timings import Timings

HERE = Path(__file__).parent
LIMIT_S = 900.0  # for one test, on a machine that others use too


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kube", "a real Kubernetes")
    group.addoption("--image", help="a tar with alchemist-on-ray's image (default: built)")
    group.addoption("--write-timings", action="store_true", help="into docs/kubernetes.md")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    missing = needs.missing()
    if not config.getoption("--image") and (reason := images.why_not()):
        missing.append(f"our image: {reason}")
    if missing:
        lines = "".join(f"\n  - {what}" for what in missing)
        pytest.exit(f"a real Kubernetes needs what is not here:{lines}", returncode=3)
    for item in ours:
        item.add_marker(pytest.mark.root)
        item.add_marker(pytest.mark.timeout(LIMIT_S, func_only=True))


@pytest.fixture(scope="session")
def timings(request: pytest.FixtureRequest) -> Iterator[Timings]:
    """Notes of how long each step took; printed, and written if asked for."""
    noted = Timings()
    yield noted
    noted.end()
    print(f"\n{noted.table()}")
    if request.config.getoption("--write-timings") and not request.session.testsfailed:
        built = ", ".join(f"{part.name} {part.seconds} s" for part in binaries.ALL if part.there)
        noted.write(f"Built once, beside other work: {built}. With what was built:")


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest) -> Path:
    """The image of `kuberay/base`, as a tar."""
    given = request.config.getoption("--image")
    return Path(given) if given else images.image_tar()


@pytest.fixture(scope="session")
def kube(image: Path, timings: Timings) -> Iterator[Cluster]:
    """The Kubernetes."""
    with Cluster([image], timings) as cluster:
        yield cluster
