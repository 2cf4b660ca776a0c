"""A computing centre for all tests here; `centre.py` says what it needs."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from tests.deploy.jupyterhub.centre import Centre, why_not
from tests.support import suite

REASON = None if suite.LONG else "takes four minutes: make test-long"
REASON = REASON or why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "jupyterhub":
            item.add_marker(pytest.mark.root)
            item.add_marker(pytest.mark.timeout(600, func_only=True))
            if REASON is not None:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="package")
def centre() -> Iterator[Centre]:
    faulthandler.cancel_dump_traceback_later()
    with Centre(2) as made:
        yield made
