"""Handles as arrays: operators, indexing, NumPy's protocols, the array API standard."""
