"""``alchemist doctor``: checks every node for common problems of Ray and MPI."""
