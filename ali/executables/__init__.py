"""Runs MPI programs that know nothing of the gang, one process per rank."""
