"""Benchmarks: ratios against peers, measured in one run.

Peers that nothing else needs are in a folder of their own (`make bench` fills it from
`peers.txt`), which is put behind all others on the path of this process and its children.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PEERS = Path(__file__).parent.parent / "build" / "peers"

# Peers start `mpiexec` from the path: the same MPI for all.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
if PEERS.is_dir() and str(PEERS) not in sys.path:
    sys.path.append(str(PEERS))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), str(PEERS)]
    )
