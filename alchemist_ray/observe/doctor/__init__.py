"""``alchemist doctor``: what an MPI user trips over, looked for on every node."""
