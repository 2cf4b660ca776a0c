"""Matrices in files: .npy, HDF5, Zarr, Parquet and CSV, read and written by all ranks at once.

A session has it behind ``load_matrix``, ``handle.save``, ``checkpoint`` and ``restore``.
"""

from ali.files import folders, routines

# Under other names than their own: a function `load` here would be the hook of `PythonLibrary`.
load_routine = routines.load
save_routine = routines.save
inspect_routine = routines.inspect
begin_folder, end_folder = folders.begin_folder, folders.end_folder
manifest = folders.manifest

__all__ = [
    "begin_folder", "end_folder", "inspect_routine", "load_routine", "manifest", "save_routine",
]  # fmt: skip
