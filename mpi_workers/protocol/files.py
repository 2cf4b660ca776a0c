"""Names of file formats, and of the files of a checkpoint."""

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
