#!/bin/bash -l
#PBS -N svd
#PBS -l nodes=3:ppn=1
#PBS -l walltime=00:30:00
#PBS -A m888
#PBS -j oe
#PBS -o /home/ada/jobs/svd/log

# Alchemist on Ray on 3 nodes of cray-cs.
set -e
cd "${PBS_O_WORKDIR:-.}"

# The site's software.
module load impi
export MPI4PY_LIBMPI="$I_MPI_ROOT/lib/release/libmpi.so.12"

# Token, address and log of this job; for this user only.
export ALCHEMIST_JOB_FOLDER=/home/ada/jobs/svd
export PATH=/home/ada/venv/bin:"$PATH"

# Starts Ray on every node, runs the program on the first, and stops Ray when the program
# ends. The job ends with the program's exit code.
# In the image: singularity exec --bind=/tmp --bind=$I_MPI_ROOT --env=LD_LIBRARY_PATH=$LD_LIBRARY_PATH /home/ada/alchemist.sif ...
exec alchemist pbs run --site cray-cs --container-runtime singularity --container /home/ada/alchemist.sif -- python cray/truncated_svd.py --name 'it'"'"'s'
