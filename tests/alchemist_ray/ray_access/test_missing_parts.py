"""The compiled parts: what an installation without them says."""

from __future__ import annotations

from pathlib import Path

import pytest

from alchemist_ray.observe.doctor import node
from alchemist_ray.observe.doctor.finding import NOTHING, WARN
from alchemist_ray.ray_access import ray_gangs
from mpi_workers import build_native


def test_a_missing_part_is_named_once_by_sessions_and_always_by_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mpi_waits.c").touch()
    monkeypatch.setattr(build_native, "SOURCES", (tmp_path / "mpi_waits.c",))
    ray_gangs._tell_of_missing_parts.cache_clear()  # a session of an earlier test has asked
    for _ in range(2):
        ray_gangs._tell_of_missing_parts()
        (*_, found) = node.copies(NOTHING)
        assert found.status == WARN
        assert "lacks mpi_waits" in found.message
    ray_gangs._tell_of_missing_parts.cache_clear()
    assert caplog.text.count("lacks mpi_waits") == 1
    assert "python -m mpi_workers.build_native" in caplog.text
    (tmp_path / "mpi_waits.so").touch()
    assert not build_native.missing()
