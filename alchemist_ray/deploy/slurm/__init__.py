"""Ray inside a job of a batch system: Slurm, or PBS.

`alchemist slurm submit|run|start|stop` and `alchemist pbs submit|run` (`cli.py`). A job script
(`script.py`, from a site file, `sites.py`) runs `alchemist slurm run`, the keeper: it reads what
the job has been given (`allocation.py`), starts one supervisor on every node in a single step
(`cluster.py`), runs the user's program on the first (`program.py`), and ends it all. A supervisor
(`node.py`) starts and ends Ray on its node (`ray_node.py`), and all that came of it
(`processes.py`, `folder.py`). In an image (`container.py`) it also starts for the ranks what is
only outside (`relay.py`).
"""
