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
#SBATCH --image=docker:me/alchemist-on-ray:0.1.0
#SBATCH --constraint=haswell

# Alchemist on Ray on 3 nodes of cray-xc.
set -e

# The site's software.
module load PrgEnv-gnu cray-mpich-abi cray-libsci
export MPICH_MAX_THREAD_SAFETY=multiple
export ALCHEMIST_LAUNCHER=srun
export ALCHEMIST_SRUN_MPI=cray_shasta
export MPI4PY_LIBMPI=/opt/udiImage/modules/mpich-cle6/lib64/libmpi.so.12

# Token, address and log of this job; for this user only.
export ALCHEMIST_JOB_FOLDER=/home/ada/jobs/svd
export PATH=/home/ada/venv/bin:"$PATH"

# Starts Ray on every node, runs the program on the first, and stops Ray when the program
# ends. The job ends with the program's exit code.
# In the image: shifter --image=docker:me/alchemist-on-ray:0.1.0 --module=mpich-cle6 ...
exec alchemist slurm run --site cray-xc --container-runtime shifter --container docker:me/alchemist-on-ray:0.1.0 -- python cray/truncated_svd.py --name 'it'"'"'s'
