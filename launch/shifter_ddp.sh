#!/bin/bash
# Run a trainer on every task of a Slurm job, in the container: srun starts the tasks, shifter enters it.
#
# usage: sbatch [SBATCH OPTION]... launch/shifter_ddp.sh [OPTION]...
#            [TRAINER | SCRIPT.py | -m MODULE] [ARGUMENT]...
#
#   source launch/site.sh perlmutter
#   HPCTRAIN_IMAGE=docker:registry/hpctrain:TAG sbatch --account=m1234 launch/shifter_ddp.sh train_ddp
#
#SBATCH --job-name=hpctrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
set -euo pipefail

# Slurm and PBS run a copy of this script, and its functions are beside the original. Those of the folder of
# the job count only if they are the user's own.
load_functions() {
    local script=$0 folder=${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-}}/launch/lib root
    [[ $0 != */slurm_script ]] || script=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%o | sed q)
    root=$(dirname "$(readlink -f "$script")")/..
    [[ -r $root/launch/lib/main.sh || ! -O $folder/main.sh ]] || root=$folder/../..
    root=${HPCTRAIN_ROOT:-$root}
    [[ -r $root/launch/lib/main.sh ]] || {
        echo 'hpctrain: error: submit from the hpctrain folder, or export HPCTRAIN_ROOT=FOLDER' >&2
        exit 2
    }
    source "$root/launch/lib/main.sh"
}
load_functions

parse_options shifter_ddp.sh "$@"
read_slurm_job
use_runtime shifter
set_program
use_launcher srun
launch
