"""The image of this tree, built once for all tests here; they skip where it cannot be."""

from __future__ import annotations

import pytest

from tests.deploy.container import images

REASON = images.why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "image" in getattr(item, "fixturenames", ()) and item.path.parent.name == "container":
            item.add_marker(pytest.mark.root)
            # The first of them builds it.
            item.add_marker(pytest.mark.timeout(images.BUILD_LIMIT_S + 300, func_only=False))
            if REASON is not None:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def image() -> str:
    """The image's name in the store of `images`."""
    return images.built()
