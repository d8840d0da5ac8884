"""What schedulers and launchers set is read as their documentation says, or refused."""

import contextlib

import hypothesis
import hypothesis.strategies as st
import pytest

import jshard
from jshard.system.jobs.cluster import Cluster, find_cluster

FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
PYTORCH_JOB = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "2",
}
DEEPSPEED = PYTORCH_JOB | {"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0"}
STEP = {
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
PMI = {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
AT = {"coordinator": "node1:1234"}


@pytest.mark.parametrize(
    ("options", "environ", "cluster"),
    [
        # torchrun listens on MASTER_PORT itself; others leave it to process 0.
        ({}, TORCHRUN | FOUR, Cluster(5, 8, "node1:29501", (1,), "torchrun")),
        ({}, TORCHRUN | STEP, Cluster(5, 8, "node1:29501", None, "torchrun")),
        ({}, PYTORCH_JOB, Cluster(1, 2, "job-master-0:23456", None, "PyTorch")),
        ({}, DEEPSPEED | FOUR, Cluster(1, 2, "job-master-0:23456", (2, 3), "PyTorch")),
        (AT, PYTORCH_JOB, Cluster(1, 2, "node1:1234", None, "PyTorch")),
        ({}, PYTORCH_JOB | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        # What says more, or less, than that there is one process.
        ({"num_processes": 1}, {"JOB_COMPLETION_INDEX": "2"}, None),
        ({"num_processes": 1}, {"PMIX_RANK": "2"}, None),
        (AT, PMI | FOUR, Cluster(6, 8, "node1:1234", (2,), "MPI")),
        (
            AT,
            {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2"}
            | {"FLUX_TASK_LOCAL_ID": "0"}
            | FOUR,
            Cluster(1, 2, "node1:1234", None, "Flux"),
        ),
        (
            AT,
            {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "6"},
            Cluster(1, 6, "node1:1234", None, "JSM"),
        ),
        # srun's own plugins for MPI say what SLURM says; mpirun in a step does not.
        (
            {},
            STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"},
            Cluster(3, 4, None, None, "SLURM"),
        ),
        ({}, STEP | {"PMIX_RANK": "3"}, Cluster(3, 4, None, None, "SLURM")),
        (AT, STEP | PMI, Cluster(6, 8, "node1:1234", None, "MPI")),
        ({}, STEP | {"WORLD_SIZE": "8"}, Cluster(3, 4, None, None, "SLURM")),
        # GPUs that SLURM binds to a task are its own; others are divided.
        ({}, STEP | FOUR, Cluster(3, 4, None, (2, 3), "SLURM")),
        *[
            (
                {},
                STEP | FOUR | {"SLURMD_TRES_BIND": binding},
                Cluster(3, 4, None, own, "SLURM"),
            )
            for binding, own in {
                "gres/gpu:per_task:2": None,
                "gres/gpu:single:1": None,
                "gres/nic:closest+gres/gpu:verbose,per_task:4": None,
                "gpu:map:0,1": None,
                "gpu:map_gpu:0,1": None,  # so in SLURM 22.05, of --gpu-bind
                "gpu:mask_gpu:0x3,0xc": None,
                "gres/gpu:mask:0x3,0xc": None,
                "gres/gpu:none": (2, 3),
                "gres/nic:closest": (2, 3),
            }.items()
        ],
        (
            {},
            STEP
            | FOUR
            | {"SLURMD_TRES_BIND": "gres/gpu:closest", "SLURM_GPUS_ON_NODE": "8"},
            Cluster(3, 4, None, None, "SLURM"),
        ),
        (
            {},
            STEP | FOUR | {"SLURMD_TRES_BIND": "gpu:none", "SLURM_GPUS_PER_TASK": "2"},
            Cluster(3, 4, None, (2, 3), "SLURM"),
        ),
        # CUDA ignores what follows the first that is no GPU.
        *[
            (
                {},
                STEP | {"CUDA_VISIBLE_DEVICES": text},
                Cluster(3, 4, None, None, "SLURM"),
            )
            for text in ("-1", "none", "NoDevFiles", "", "0,-1,1")
        ],
        (
            {},
            STEP | {"CUDA_VISIBLE_DEVICES": "GPU-8f1a,GPU-11c2"},
            Cluster(3, 4, None, (1,), "SLURM"),
        ),
    ],
)
def test_a_process_joins_where_its_environment_says_all_that_is_needed(
    options, environ, cluster
):
    assert find_cluster(options, environ) == cluster


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        (
            {},
            {"JOB_COMPLETION_INDEX": "2"},
            "JOB_COMPLETION_INDEX=2: .*--num_processes=1",
        ),
        ({}, {"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_COORDINATOR_ADDRESS=a:1: "),
        ({}, {"RANK": "1"}, "RANK=1: this is one of several processes"),
        ({}, {"WORLD_SIZE": "4"}, "one of 4; give --process_id"),
        ({}, {"PMIX_RANK": "0"}, "PMIX_RANK=0: "),
        ({}, {"PALS_RANKID": "0"}, "PALS_RANKID=0: "),
        ({}, PMI, r"MPI started 8 processes \(PMI_RANK\), but the address"),
        ({}, {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "Flux started 2 processes"),
        ({}, {"RANK": "0", "WORLD_SIZE": "2"}, r"PyTorch started 2 processes \(RANK\)"),
        ({}, PYTORCH_JOB | {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8: "),
        ({}, PYTORCH_JOB | {"RANK": "x"}, "RANK=x: must be a number"),
        ({}, STEP | PYTORCH_JOB, "process 3 of 4, RANK and WORLD_SIZE 1 of 2"),
        ({}, PYTORCH_JOB | FOUR | {"LOCAL_RANK": "0"}, "share the 4 GPUs of this host"),
        *[
            ({}, STEP | FOUR | {"SLURMD_TRES_BIND": f"gres/gpu:{binding}"}, binding)
            for binding in ("closest", "single:2", "map_gpu:1", "map:1", "mask:0x3,0x6")
        ],
    ],
)
def test_an_environment_of_several_processes_that_says_too_little_is_refused(
    options, environ, message
):
    with pytest.raises(jshard.UserError, match=message) as error:
        find_cluster(options, environ)
    assert "\n" not in str(error.value)


ALL = [
    TORCHRUN,
    DEEPSPEED,
    STEP | FOUR,
    STEP | {"SLURMD_TRES_BIND": "gres/gpu:map:0*2,1"} | FOUR,
    PMI,
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"} | FOUR,
    {"JSHARD_LOCAL": "0/2"},
    {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"},
]
PIECES = [
    "",
    "0",
    "1",
    "-1",
    "9" * 9,
    "9" * 30,
    "x",
    "(x",
    ")",
    ",",
    "*",
    "/",
    ":",
    "0x",
]
VALUES = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)


@hypothesis.given(st.sampled_from(ALL), st.data())
def test_a_malformed_variable_ends_in_no_traceback(environ, data):
    name = data.draw(st.sampled_from(sorted(environ)))
    options = data.draw(st.sampled_from([{}, AT]))
    with contextlib.suppress(jshard.UserError):
        find_cluster(options, environ | {name: data.draw(VALUES)})
