"""JupyterHub whose notebook servers are jobs of Slurm: `docs/computing-centre.md` explains it."""

import batchspawner  # type: ignore[import-untyped]  # noqa: F401 - its servers tell the hub their port

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - of JupyterHub
c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.JupyterHub.hub_ip = "0.0.0.0"  # the nodes connect to it
c.SlurmSpawner.exec_prefix = "sudo -E -u {username}"
c.SlurmSpawner.req_nprocs = "2"  # CPUs of the notebook's job, for gangs of its own, too
c.SlurmSpawner.req_memory = "4G"
c.SlurmSpawner.req_runtime = "8:00:00"
c.SlurmSpawner.req_srun = ""  # the server is no step: `alchemist slurm start` makes steps
c.SlurmSpawner.start_timeout = 300
