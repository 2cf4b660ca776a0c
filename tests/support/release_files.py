"""Files that a version leaves behind: a checkpoint, a pickled handle, a gang's entry.

``python -m tests.support.release_files`` writes those of this version below ``FOLDER``, once: after
its tag they are not changed. `tests/alchemist_ray/session/test_upgrades.py` reads those of all
versions.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
from scipy import sparse

from alchemist_ray import AlchemistSession, __version__
from alchemist_ray.cluster.actors import ask, find_gang
from mpi_workers.matrix.dtypes import DTYPES

FOLDER = Path(__file__).parents[1] / "data/releases"
TIMES = np.array(["2026-11-29", "NaT", "1969-12-31T23:59:59"], dtype="datetime64[s]")
SPARSE = sparse.csr_array(np.diag([1.0, 2.0, 3.0]))


def matrices() -> dict[str, np.ndarray]:
    """The dense matrices of the checkpoint, by name: each dtype, a vector, three axes."""
    found = {f"of_{name}": np.arange(12).reshape(4, 3).astype(name) for name in sorted(DTYPES)}
    return {**found, "vector": np.linspace(0, 1, 5), "cube": np.arange(24.0).reshape(2, 3, 4)}


def layouts() -> dict[str, str]:
    """Their layouts, where these are not the default."""
    return {"cube": "BLOCK", "of_float32": "MC_MR", "of_int64": "BLOCK_CYCLIC:2"}


def main() -> None:
    """Write the files of this version."""
    target = FOLDER / __version__
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        with AlchemistSession(2, name="release", lifetime="detached", progress=False) as als:
            kept = [
                als.send_matrix(array, name=name, layout=layouts().get(name, "VC_STAR"))
                for name, array in matrices().items()
            ]
            kept += [als.send_matrix(TIMES, name="times")]
            kept += [als.send_matrix(SPARSE, name="sparse")]
            als.checkpoint(made / "checkpoint")
            (made / "handle.pickle").write_bytes(pickle.dumps(als.matrix("cube")))
            entry = ask(find_gang("release").about())
            (made / "gang.json").write_text(json.dumps(entry, indent=1, default=repr) + "\n")
            AlchemistSession.stop_gang("release")
        shutil.copytree(made, target)


if __name__ == "__main__":
    main()
