"""Names of files that the client side and the ranks must agree on: formats and checkpoints."""

SUFFIXES = {  # of a path, and the module of `ali.files` for its format
    ".npy": "npy",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".zarr": "zarr3",
    ".parquet": "parquet",
    ".csv": "text",
}
TABLES = (".csv", ".parquet")  # formats whose columns have names
MANIFEST = "manifest.json"  # of a checkpoint
CHECKPOINT_FORMAT = "alchemist-on-ray checkpoint"
