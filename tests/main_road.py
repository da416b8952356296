"""Which slow tests `make test` runs: what README.md promises, and the tests that show it.

`make test-fast` and `make test` run every fast test, `make test-all` every test.
tests/test_main_road.py checks that each promise is a quote from README.md, that each of its rows and sections
has a promise, and that each test exists. A test is a file below tests/, a function, or a function with
parameters.
"""

import pytest

# Each launcher with apptainer, and srun with the other runtimes: seven of the 45 cells. Of horovodrun with
# podman-hpc, and of PBS without a container, tests/launch/test_environment.py has a cell below.
MATRIX = [
    f"launch/test_matrix.py::test_the_same_weights_bit_for_bit[{cell}]"
    for cell in (
        "srun-apptainer-train_ddp",
        "torchrun-apptainer-train_lightning",
        "mpirun-apptainer-train_horovod",
        "srun + PMI-apptainer-train_ddp",
        "horovodrun-apptainer-train_horovod",
        "srun-podman-hpc-train_lightning",
        "srun-bare-train_horovod",
    )
]

MAIN_ROAD = {
    # ---- hpctrain ----
    "the same weights with every launcher and runtime": [
        "vision/test_train.py::test_two_ranks_give_the_weights_of_one_process"
    ],
    "At its time limit, after a preemption and": [
        "launch/test_requeue.py::test_how_a_job_ends[limit]",
        "launch/test_requeue.py::test_how_a_job_ends[preempted]",
    ],
    "when a rank or a node dies, Slurm requeues the job and it resumes": [
        "launch/test_requeue.py::test_a_trainer_ends_with_the_weights_of_a_run_that_nothing_happened_to",
        "launch/test_requeue.py::test_a_job_whose_node_dies_resumes_from_its_last_checkpoint",
    ],
    "make venv": ["docs/test_readme.py::test_there_are_commands"],
    "make demo": ["docs/test_readme.py::test_on_this_machine[README.md]"],
    # ---- The command hpctrain ----
    "`apptainer exec hpctrain-cu130.sif hpctrain`": ["docs/test_readme.py::test_on_the_cluster[README.md]"],
    # ---- On a GPU cluster, Which script ----
    "make sif": [
        "containers/test_image.py::test_the_sif_has_at_most_600_mb",
        "containers/test_image.py::test_it_has_the_locked_versions",
        "containers/test_image.py::test_torchvision_computes_without_a_warning",
        "containers/test_image_files.py::test_nothing_is_privileged_or_writable_by_everyone",
        "containers/test_image_files.py::test_no_secret_and_no_name_of_the_build_machine",
        "containers/test_image.py::test_make_builds_nothing_twice",
    ],
    "SBOM, provenance, `make verify`": ["containers/test_record.py::test_the_image_is_as_its_record_says"],
    "sbatch launch/apptainer_ddp.sh": ["docs/test_readme.py::test_on_the_cluster[README.md]"],
    "`check.sh` checks every rank": ["launch/test_launch.py::test_check_and_then_the_run_in_one_job"],
    "`--dry-run` prints the commands": ["launch/test_launch.py::test_what_a_dry_run_prints_can_be_run"],
    "| `apptainer_ddp.sh` |": [MATRIX[0]],
    "| `apptainer_torchrun.sh` |": [MATRIX[1]],
    "| `apptainer_mpi.sh` |": [MATRIX[2], MATRIX[3]],
    "| `apptainer_horovod.sh` |": [MATRIX[4]],
    "| `podman_hpc_ddp.sh` |": [MATRIX[5]],
    "| `shifter_ddp.sh` |": ["launch/test_launch.py::test_shifter"],
    "| `modules_ddp.sh` |": ["launch/test_launch.py::test_without_a_container[module]"],
    "| `pbs_ddp.sh` |": ["launch/test_launch.py::test_pbs"],
    "| `jupyter.sh` |": [
        "servers/test_jupyter.py::test_a_cell_trains_on_two_ranks_through_the_command_of_the_log"
    ],
    "| `local.sh` |": ["launch/test_launch.py::test_local_in_the_container"],
    "| `check.sh` |": ["launch/test_launch.py::test_check_and_then_the_run_in_one_job"],
    # ---- Your own script ----
    "passes its arguments on unchanged": [
        "launch/test_launch.py::test_the_arguments_of_a_script_arrive_as_they_are",
        *[
            f"launch/test_environment.py::test_every_rank_gets_what_the_shell_has[{cell}]"
            for cell in ("srun-apptainer", "horovodrun-podman-hpc", "PBS-bare")
        ],
        "launch/test_environment.py::test_a_job_submitted_inside_a_step_of_another_job",
    ],
    "a Lightning `Trainer` only": [
        f"launch/test_launch.py::test_the_script_of_a_tutorial[examples/lightning/{script}.py-srun]"
        for script in ("mnist", "bert_nsmc")
    ],
    "With `import hpctrain` your loop": [
        "test_own_script.py::test_the_last_example_resumes_bit_for_bit_after_sigkill"
    ],
    # ---- Fine-tuning ----
    "text classification, sentence pairs, named entities": [
        "nlp/test_cluster.py::test_sample_training_and_predict_need_only_the_image",
        "docs/test_readme.py::test_on_the_cluster[README.md]",  # nlp.classify, nlp.ner
        "docs/test_readme.py::test_on_this_machine[README.md]",  # nlp.pair
        "nlp/test_cluster.py::test_four_ranks_on_two_nodes_score_as_one_process_does[qa]",
        "nlp/test_cluster.py::test_four_ranks_on_two_nodes_score_as_one_process_does[generate]",
        "nlp/test_cluster.py::test_a_model_split_over_two_nodes_gives_the_loss_of_one_process"
        "[tensor-parallel]",
    ],
    "`hpctrain serve` shows a model": [
        "nlp/test_serve.py::test_the_page_in_a_browser_asks_for_the_token_and_marks_the_answer"
    ],
    # ---- What works ----
    "`train_horovod` ran with every launcher": MATRIX,
}

# What the README does not say, but every user relies on.
MAIN_ROAD_BESIDE_THE_README = {
    "nobody else on the cluster can change a job or read its secrets": [
        "launch/test_other_users.py::test_another_user_of_the_cluster_changes_nothing_in_a_running_job",
        "launch/test_other_users.py::test_no_image_is_entered_that_another_user_can_write",
        "launch/test_other_users.py::test_no_secret_is_on_a_command_line",
        "distributed/test_strangers.py::test_a_stranger_does_not_become_a_rank",
        "distributed/test_strangers.py::test_a_pickle_of_another_rank_is_not_executed[gather]",
        "distributed/test_strangers.py::test_ranks_join_with_a_secret_and_use_a_prefix_that_it_hides",
        "files/test_other_users.py::test_a_run_holds_no_secret_and_is_for_its_user_alone",
    ],
    "a rank that fails ends the job, is named, and leaves nothing behind": [
        "launch/test_failures.py::test_a_killed_rank_ends_the_whole_job_and_is_named",
        "launch/test_failures.py::test_nothing_is_left_of_any_job",
        "launch/test_launch.py::test_nothing_is_left_of_any_job",
    ],
    "a training that was interrupted ends as one that was not": [
        "nlp/training/test_finetune.py::test_resumed_run_ends_with_the_same_weights",
        "training/test_run.py::test_a_run_that_is_interrupted_again_and_again_ends_as_one_that_was_not",
        "run/test_record.py::test_a_disk_that_is_full_leaves_no_torn_result",
    ],
    "make venv has MPI and runs other people's scripts": ["docs/test_laptop.py"],
    "benchmarks/gpu.py leaves a table whenever it ends": [
        "benchmarks/test_gpu.py::test_whatever_ends_it_leaves_a_table_and_the_next_one_goes_on"
    ],
    "the sources keep their rules": ["test_lint.py", "test_options.py"],
}

TESTS = [
    test
    for promises in (MAIN_ROAD, MAIN_ROAD_BESIDE_THE_README)
    for tests in promises.values()
    for test in tests
]


def names(test: str, node: str) -> bool:
    """Whether an entry of the table names a test, by its node ID."""
    node = node.removeprefix("tests/")
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def mark(items: list[pytest.Item]) -> None:
    """Give the tests of the table the mark main_road."""
    for item in items:
        if any(names(test, item.nodeid) for test in TESTS):
            item.add_marker("main_road")
