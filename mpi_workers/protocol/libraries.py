"""Names of libraries, and of routines with a meaning of their own."""

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
