"""``ray start`` without Ray Client's server: ``python -m alchemist_ray.deploy.slurm.ray_start``.

Ray starts that server on the head whenever gRPC is installed, at all interfaces, and has no option
against it. Sessions do not use it.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.scripts import scripts

if __name__ == "__main__":
    commands: Any = scripts
    commands.get_ray_client_dependency_error = lambda: "not used"
    sys.exit(int(commands.cli(["start", *sys.argv[1:]]) or 0))
