"""Which process of which job this is, by options and by schedulers' environments."""

import pytest

import jshard
from jshard.system.jobs.cluster import Cluster, find_cluster

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OPEN_MPI_4 = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:3491"}
AT = {"coordinator": "host0:1234"}
EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.mark.parametrize(
    ("options", "environ", "cluster"),
    [
        ({}, {}, None),
        ({"num_processes": 1}, {}, None),
        (
            {**AT, "num_processes": 2, "process_id": 1},
            {},
            Cluster(1, 2, "host0:1234", None, "options"),
        ),
        (
            {**AT, "num_processes": 2, "process_id": 1, "local_device_ids": "2,3"},
            {},
            Cluster(1, 2, "host0:1234", (2, 3), "options"),
        ),
        (
            {"num_processes": 2, "process_id": 0},
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_LOCAL_DEVICE_IDS": "5"},
            Cluster(0, 2, "a:1", (5,), "options"),
        ),
        ({}, SLURM, Cluster(3, 4, None, None, "SLURM")),
        (AT, SLURM, Cluster(3, 4, "host0:1234", None, "SLURM")),
        ({}, SLURM | EIGHT, Cluster(3, 4, None, (4, 5, 6, 7), "SLURM")),
        (
            {},
            SLURM | EIGHT | {"SLURM_GPUS_PER_TASK": "8"},
            Cluster(3, 4, None, None, "SLURM"),
        ),
        (
            {},
            SLURM | EIGHT | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
            Cluster(3, 4, None, None, "SLURM"),
        ),
        ({}, OPEN_MPI_4, Cluster(2, 4, None, None, "Open MPI")),
        (AT, OPEN_MPI | EIGHT, Cluster(2, 4, "host0:1234", (0, 1, 2, 3), "Open MPI")),
        (
            {**AT, "num_processes": 3},
            {"JOB_COMPLETION_INDEX": "2"},
            Cluster(2, 3, "host0:1234", None, "Kubernetes"),
        ),
        (
            {},
            {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"},
            Cluster(1, 2, None, None, "Google Cloud"),
        ),
        # Started by jshard.launch: one of several of its host, or alone there.
        (
            {**AT, "num_processes": 4, "process_id": 3},
            EIGHT | {"JSHARD_LOCAL": "1/2"},
            Cluster(3, 4, "host0:1234", (4, 5, 6, 7), "options"),
        ),
        (
            {**AT, "num_processes": 4, "process_id": 3},
            EIGHT | {"JSHARD_LOCAL": "0/1"} | SLURM,
            Cluster(3, 4, "host0:1234", None, "options"),
        ),
        (
            {},
            SLURM | EIGHT | {"JAX_PLATFORMS": "cpu"},
            Cluster(3, 4, None, None, "SLURM"),
        ),
        # A batch script is no step: its commands are alone, until srun starts them.
        ({}, {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
    ],
)
def test_a_process_finds_its_place_in_a_job(options, environ, cluster):
    assert find_cluster(options, environ) == cluster


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        (AT, {}, "--coordinator also needs --num_processes=N"),
        ({"process_id": 0}, {}, "--process_id also needs --num_processes=N"),
        ({"num_processes": 2}, {}, "give --process_id=0 to 1"),
        ({**AT, "num_processes": 2}, {}, "the rank of this process is unknown"),
        (
            {**AT, "num_processes": 2, "process_id": 2},
            {},
            "less than the number of processes, 2",
        ),
        (
            {"num_processes": 2, "process_id": 0},
            {},
            "the address of process 0 is unknown",
        ),
        ({"coordinator": "host0"}, SLURM, "must be HOST:PORT"),
        (
            {**AT, "local_device_ids": "a"},
            SLURM,
            "must be distinct numbers",
        ),
        ({}, OPEN_MPI, "the address of process 0 is unknown"),
        (
            {},
            SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2"},
            "2 processes cannot share the 3 GPUs of a host evenly",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused_in_one_line(options, environ, message):
    with pytest.raises(jshard.UserError, match=message) as error:
        find_cluster(options, environ)
    assert "\n" not in str(error.value)
