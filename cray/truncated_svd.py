"""The truncated SVD of a random matrix on all CPUs of a job; see cray/README.md.

alchemist slurm submit -N 3 -t 30 -- python cray/truncated_svd.py
"""

from __future__ import annotations

import argparse

import numpy as np
import ray

from alchemist_ray import AlchemistSession

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rows", type=int, default=20_000)
parser.add_argument("--columns", type=int, default=500)
parser.add_argument("--rank", type=int, default=10)
parser.add_argument("--workers", type=int, help="MPI ranks (default: one per CPU)")
options = parser.parse_args()

als = AlchemistSession()  # finds the job's Ray
cpus = int(ray.cluster_resources()["CPU"])
workers = als.request_workers(options.workers or cpus)
hosts = sorted({worker.hostname for worker in workers})
print(f"{len(workers)} ranks on {len(hosts)} nodes: {', '.join(hosts)}")

A = np.random.default_rng(0).random((options.rows, options.columns))
handle = als.send_matrix(A, layout="VC_STAR", print_times=True)
linalg = als.load_library("linalg")
S, U, V = linalg.truncated_svd(handle, rank=options.rank)  # handles: the factors stay on the ranks
values = als.fetch_matrix(S, print_times=True).ravel()
print("singular values:", np.array2string(values, precision=6))

# The factors satisfy A V = U diag(S).
error = np.linalg.norm(A @ V.fetch() - U.fetch() * values) / values[0]
print(f"relative error of A V = U S: {error:.1e}")
als.stop()
raise SystemExit(0 if error < 1e-8 else 1)
