"""What the client side and the ranks must agree on: names of libraries, routines, files, output."""

from collections.abc import Sequence

SHIPPED = {  # names, and the ranks' modules
    "linalg": "ali.linalg",
    "scalapack": "ali.scalapack",
    "elemental": "ali.elemental",
    "files": "ali.files",
    "sparse": "ali.sparse",
    "petsc": "ali.petsc",
    "slepc": "ali.petsc.slepc",
    "simulator": "ali.simulator",
    "program": "ali.executables.stepped_program",
    "hpc": "ali.hpc",
    "echo": "ali.echo",
}
ARRAYS = "ali.arrays"  # linalg under another name: a library `linalg` of the user is left alone
# Results of the first are arguments of the second: so the state of a library outlives its ranks.
SAVE_STATE = "save_state"
LOAD_STATE = "load_state"
ENTRY_POINTS = "alchemist.libraries"  # the group in which packages name their libraries


SUFFIXES = {  # of a path, and the module of `ali.files` for its format
    ".npy": "npy",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".nc": "hdf5",  # NetCDF-4
    ".zarr": "zarr3",
    ".parquet": "parquet",
    ".csv": "text",
}
SPARSE_SUFFIXES = (".npz", ".mtx", ".mtx.gz", ".petsc")  # SciPy's, Matrix Market's, PETSc's files
TIME = "time"  # the key of the dtype of dates and durations, in what is said of columns
TABLES = (".csv", ".parquet")  # formats whose columns have names
MANIFEST = "manifest.json"  # of a checkpoint
CHECKPOINT_FORMAT, CHECKPOINT_VERSION = "alchemist-on-ray checkpoint", 1
AUTOMATIC = ".automatic"  # added to a gang's checkpoint folder: the folder of its automatic ones
ALIGNMENT = 64
# Warnings of NumPy's reductions, in replies beside NumPy's four flags of floating-point errors.
SLICE_WARNINGS = {
    "Mean of empty slice": 16, "Degrees of freedom <= 0 for slice": 32,
    "All-NaN slice encountered": 64,
}  # fmt: skip
STDOUT, STDERR = 1, 2
Line = tuple[int, int, str]  # that a rank has printed: rank, stream, text without its newline


def places(sizes: Sequence[int]) -> list[slice]:
    """Where parts of these bytes begin and end in one vector: each array in them is aligned."""
    found, at = [], 0
    for nbytes in sizes:
        found.append(slice(at, at + nbytes))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return found
