#!/bin/bash -l
#PBS -N svd
#PBS -l nodes=3:ppn=8
#PBS -l walltime=00:30:00
#PBS -A m888
#PBS -j oe
#PBS -o /home/ada/jobs/svd/log

# Alchemist on Ray on 3 nodes of cray-cs-slurm.
set -e
cd "${PBS_O_WORKDIR:-.}"

# The site's software.
module load openmpi cuda

# Token, address and log of this job; for this user only.
export ALCHEMIST_JOB_FOLDER=/home/ada/jobs/svd
export PATH=/home/ada/alchemist/.venv/bin:"$PATH"

# Starts Ray on every node, runs the program on the first, and stops Ray when the program
# ends. The job ends with the program's exit code.
exec alchemist pbs run --site cray-cs-slurm -- python cray/truncated_svd.py --name 'it'"'"'s'
