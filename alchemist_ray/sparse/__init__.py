"""Sparse matrices on a gang: `linalg` has SciPy's names."""
