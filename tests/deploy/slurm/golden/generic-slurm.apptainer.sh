#!/bin/bash
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

# Alchemist on Ray on 3 nodes of generic-slurm.
set -e

# Token, address and log of this job; for this user only.
export ALCHEMIST_JOB_FOLDER=/home/ada/jobs/svd
export PATH=/home/ada/venv/bin:"$PATH"

# Starts Ray on every node, runs the program on the first, and stops Ray when the program
# ends. The job ends with the program's exit code.
# In the image: apptainer exec --bind=/tmp docker://me/alchemist-on-ray:0.1.0 ...
exec alchemist slurm run --site generic-slurm --container-runtime apptainer --container docker://me/alchemist-on-ray:0.1.0 -- python cray/truncated_svd.py --name 'it'"'"'s'
