"""``alchemist bench``: a small HPC benchmark, to compare machines."""
