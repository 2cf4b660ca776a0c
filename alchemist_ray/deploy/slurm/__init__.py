"""Ray inside a job of a batch system: Slurm or PBS.

``alchemist slurm submit|run|start|stop`` and ``alchemist pbs submit|run`` (`cli`).
A job script (`script`, from a site file, `sites`) runs ``alchemist slurm run``, the *keeper*: it
reads the job's allocation (`allocation`), starts a *supervisor* on every node in a single step
and starts Ray (`keeper`), runs the user's program on the first node (`program`),
and stops everything. A supervisor (`node`) starts and stops Ray on its node, and
removes its processes and files. For ranks in an image (`sites`) it also
runs launchers that are installed only outside the image (`relay`).
"""
