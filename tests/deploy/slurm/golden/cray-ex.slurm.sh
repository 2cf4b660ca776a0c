#!/bin/bash -l
#SBATCH --job-name=svd
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=00:30:00
#SBATCH --account=m888
#SBATCH --output=/home/ada/jobs/svd/log
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --constraint=cpu

# Alchemist on Ray on 3 nodes of cray-ex.
set -e

# The site's software.
module load PrgEnv-gnu cray-mpich-abi cray-libsci
export MPICH_OFI_STARTUP_CONNECT=1
export FI_CXI_DEFAULT_CQ_SIZE=131072
export MPICH_GPU_SUPPORT_ENABLED=0
export ALCHEMIST_LAUNCHER=srun
export ALCHEMIST_SRUN_MPI=cray_shasta
export MPI4PY_LIBMPI="$CRAY_MPICH_DIR/lib-abi-mpich/libmpi.so.12"
export SCALAPACK_LIB="$CRAY_LIBSCI_PREFIX_DIR/lib/libsci_gnu_mpi.so"

# Token, address and log of this job; for this user only.
export ALCHEMIST_JOB_FOLDER=/home/ada/jobs/svd
export PATH=/home/ada/alchemist/.venv/bin:"$PATH"

# Starts Ray on every node, runs the program on the first, and stops Ray when the program
# ends. The job ends with the program's exit code.
exec alchemist slurm run --site cray-ex -- python cray/truncated_svd.py --name 'it'"'"'s'
