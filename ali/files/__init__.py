"""Matrices in files: .npy, HDF5, Zarr, Parquet and CSV, read and written by all ranks at once.

Rank 0 reads and writes those of sparse matrices.

Implements ``load_matrix``, ``handle.save``, ``checkpoint`` and ``restore`` of a session.
"""

from ali.files import routines
from ali.files.sparse import load_sparse, save_sparse

# Renamed, because `PythonLibrary` calls a module's function `load` when it loads the library.
load_routine = routines.load
save_routine = routines.save
inspect_routine = routines.inspect
begin_folder, end_folder = routines.begin_folder, routines.end_folder
manifest, check_folder = routines.manifest, routines.check_folder
stamp = routines.stamp

__all__ = [
    "begin_folder", "check_folder", "end_folder", "inspect_routine", "load_routine",
    "load_sparse", "manifest", "save_routine", "save_sparse", "stamp",
]  # fmt: skip
