#!/bin/bash
# Submit a command with 1, 2, 4, ... ranks, one job each. Then hpctrain scaling FOLDER compares them.
#
# usage: launch/scaling.sh [--weak] [--gpus] FOLDER RANKS RANKS_PER_NODE LAUNCH_SCRIPT TRAINER [OPTION]...
#
#   launch/scaling.sh runs/strong 1,2,4,8 4 launch/apptainer_ddp.sh train_ddp --data mnist --batch-size 512
#   launch/scaling.sh --weak runs/weak 1,2,4 4 launch/apptainer_ddp.sh train_ddp --data mnist --batch-size 64
#
# mnist is a folder with MNIST's four idx files; docs/guides/trainers.md says where they come from.
#
#   --weak   the batch size is that of a rank, and grows with the ranks (weak scaling); without, that of all
#            together (strong)
#   --gpus   ask for a GPU for each rank
#
# sbatch reads its own variables, too: SBATCH_ACCOUNT, SBATCH_PARTITION (source launch/site.sh).
set -euo pipefail

die() {
    echo "hpctrain: error: ${*//[[:cntrl:]]/?}" >&2
    exit 2
}

[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
weak='' gpus=''
while [[ ${1:-} == -* ]]; do
    case $1 in
        --weak) weak=1 ;;
        --gpus) gpus=1 ;;
        *) die "there is no option $1: see --help" ;;
    esac
    shift
done
(($# >= 5)) || die "give FOLDER RANKS RANKS_PER_NODE LAUNCH_SCRIPT TRAINER: see --help"
folder=$1 script=$4
[[ $script == */* ]] || script=$(type -P -- "$script") || script=$4 # by the module it is on the PATH
[[ $2 =~ ^[1-9][0-9]{0,6}(,[1-9][0-9]{0,6})*$ ]] || die "RANKS is '$2': give numbers, such as 1,2,4,8"
[[ $3 =~ ^[1-9][0-9]{0,3}$ ]] || die "RANKS_PER_NODE is '$3': give a number, such as 4"
[[ -r $script ]] || die "there is no $script: give a launch script, such as launch/apptainer_ddp.sh"
[[ -z $(ls -A "$folder" 2>/dev/null) ]] || die "$folder has files already: give another FOLDER"
ranks=${2//,/ } per_node=$3
shift 4
words=("$@") batch=''
for i in "${!words[@]}"; do
    [[ ${words[i]} != --batch-size ]] || batch=$((i + 1))
done
[[ -z $weak || ${words[batch]:-} =~ ^[1-9][0-9]{0,6}$ ]] ||
    die "--weak needs --batch-size N, that of a rank: give one"
size=${words[batch]:-}

for n in $ranks; do
    ((n < per_node || n % per_node == 0)) || die "$n ranks do not fill nodes of $per_node: leave out $n"
done
command -v sbatch >/dev/null ||
    die "there is no sbatch on the PATH of $(hostname): run this on a login node of a Slurm cluster"
per_node_option=--gpus-per-node=
[[ ! -v SBATCH_GRES ]] || per_node_option=--gres=gpu: # sbatch would grant what both say
for n in $ranks; do
    tasks=$((n < per_node ? n : per_node))
    [[ -z $weak ]] || words[batch]=$((size * n))
    options=("--nodes=$((n / tasks))" "--ntasks-per-node=$tasks" ${gpus:+"$per_node_option$tasks"})
    sbatch "${options[@]}" "$script" "${words[@]}" --out "$folder/$n-ranks"
done
echo "when the jobs have ended: hpctrain scaling $folder"
