"""A gang with a name in a job of its own, to which notebooks of its user attach by that name.

    alchemist slurm submit -N 2 -t 600 -J shots -- python -m cray.gang shots 8

Before the time limit of the job its matrices are saved; the next job of that name begins with them.
"""

import sys
import threading
from pathlib import Path

from alchemist_ray import AlchemistSession

if __name__ == "__main__":
    name, workers = sys.argv[1], int(sys.argv[2])
    folder = Path.home() / ".alchemist/checkpoints" / name
    if folder.exists():
        als = AlchemistSession.restore(folder, workers, name=name, lifetime="detached")
    else:
        als = AlchemistSession(workers, name=name, lifetime="detached")
    file = als.publish()
    print(f"gang {name} is ready: AlchemistSession.attach({name!r})", flush=True)
    try:
        threading.Event().wait()  # for SIGTERM, which raises SystemExit
    finally:
        file.unlink(missing_ok=True)
        als.cancel(everyone=True)  # the checkpoint waits for no call
        folder.parent.mkdir(parents=True, exist_ok=True)
        als.checkpoint(folder)
