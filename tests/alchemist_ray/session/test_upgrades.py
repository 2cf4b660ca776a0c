"""What earlier versions left behind: their checkpoints, pickled handles, and entries of gangs."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from alchemist_ray import AlchemistSession, GangInfo, Handle
from alchemist_ray.errors import SessionError, StaleHandleError
from alchemist_ray.gateway import protocol
from alchemist_ray.ray_access import catalogue
from alchemist_ray.version import __version__
from ali.scaffold import include_directory
from mpi_workers.protocol.files import CHECKPOINT_VERSION
from mpi_workers.wire import frames
from tests.support import release_files

ROOT = Path(__file__).parents[3]
VERSIONS = sorted(path.name for path in release_files.FOLDER.iterdir())
of_each_version = pytest.mark.parametrize("version", VERSIONS)


def test_there_are_files_of_this_version() -> None:
    """`python -m tests.support.release_files` makes them."""
    assert __version__ in VERSIONS


@of_each_version
@pytest.mark.parametrize("num_workers", [None, 3])
def test_a_checkpoint_is_restored(cluster: str, version: str, num_workers: int | None) -> None:
    folder = release_files.FOLDER / version / "checkpoint"
    with AlchemistSession.restore(folder, num_workers) as als:
        for name, array in release_files.matrices().items():
            handle = als.matrix(name)
            assert (handle.dtype, handle.shape) == (array.dtype, array.shape)
            assert handle.layout == release_files.layouts().get(name, "VC_STAR")
            np.testing.assert_array_equal(handle.fetch(), array)
        np.testing.assert_array_equal(als.matrix("sparse").fetch().toarray(), np.diag([1, 2, 3]))
        times = als.matrix("times").fetch()
        np.testing.assert_array_equal(times, release_files.TIMES.astype(times.dtype))


@of_each_version
def test_a_pickled_handle_is_read_and_says_that_its_gang_has_ended(
    cluster: str, version: str
) -> None:
    handle = pickle.loads((release_files.FOLDER / version / "handle.pickle").read_bytes())
    assert isinstance(handle, Handle)
    cube = release_files.matrices()["cube"]
    assert (handle.name, handle.shape, handle.dtype) == ("cube", cube.shape, cube.dtype)
    assert (handle.layout, handle.gang) == ("BLOCK", "release")
    with pytest.raises(StaleHandleError, match="cube"):
        handle.fetch()


@of_each_version
def test_an_entry_of_a_gang_is_read_and_another_version_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = json.loads((release_files.FOLDER / version / "gang.json").read_text())
    assert entry["version"] == version
    gang = GangInfo.of(entry)
    assert (gang.name, gang.workers, gang.state) == ("release", 2, "ready")
    monkeypatch.setattr(catalogue, "__version__", "99.0.0")
    with pytest.raises(SessionError, match=rf"runs alchemist-on-ray {re.escape(version)} .*99\.0"):
        catalogue._check_version("release", entry)


def test_the_page_names_the_numbers_of_all_formats() -> None:
    """A number that was raised, and its reason, are written down in the same change."""
    headers = "".join(path.read_text() for path in include_directory().glob("*.h"))
    numbers = {
        "frames between processes": frames.VERSION,
        "gateway.s protocol": protocol.PROTOCOL,
        "C ABI": re.search(r"define ALCHEMIST_ABI (\d+)", headers),
        "C clients": re.search(r"ALCHEMIST_CLIENT_VERSION = (\d+)", headers),
        "checkpoints": CHECKPOINT_VERSION,
    }
    page = (ROOT / "docs/upgrades.md").read_text()
    for name, found in numbers.items():
        number = found[1] if isinstance(found, re.Match) else found
        assert re.search(rf"^\| {name} .*\| {number} \|", page, re.MULTILINE), (name, number)
