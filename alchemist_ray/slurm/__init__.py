"""Ray inside a job of a batch system: Slurm, or PBS.

`alchemist slurm submit|run|start|stop` and `alchemist pbs submit|run` (`cli.py`). A job script
(`script.py`, from a site file, `sites.py`) runs `alchemist slurm run`: it reads what the job has
been given (`allocation.py`), starts one supervisor on every node in a single step (`cluster.py`,
`node.py`), which start and end Ray there, runs the user's program on the first, and ends it all.
"""
