"""A gang that cannot be started again ends as without `max_failures`, and leaves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from alchemist_ray.errors import GroupFailedError, StaleHandleError
from tests.faults.recovery.conftest import Recovering

HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(90, func_only=True)


@pytest.mark.cell("rank", "recovering", "max_failures", "lost")
def test_starts_that_fail_are_losses_until_none_is_left(clean: None, tmp_path: Path) -> None:
    gang = Recovering(max_failures=3)
    A = gang.als.send_matrix(np.ones((20, 20)))
    shutil.copy(HERE / "trap.py", tmp_path)
    gang.als.load_library("trap", tmp_path / "trap.py")
    (tmp_path / "trap.order").write_text("die")  # all further ranks, when they load it
    gang.kill()
    with pytest.raises(GroupFailedError, match="was not started again, after 3 failures") as caught:
        A.fetch()
    assert "SIGKILL" in str(caught.value)
    (tmp_path / "trap.order").unlink()
    gang.als.request_workers(2)
    with pytest.raises(StaleHandleError):
        A.fetch()
    assert gang.als.send_matrix(np.ones((20, 20))).fetch().sum() == 400
    gang.als.close()
