"""The scripts in docs/cluster, run: with stand-ins for srun, pods and ssh."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jobs import environment, free_port, write_recipe
from resumable import read_metrics

SCRIPTS = Path(__file__).parents[3] / "docs" / "cluster"
STEPS = 4
TINY = f"""
def smaller(get):
    def get_config():
        config = get()
        config.steps = {STEPS}
        config.mesh.cpu_devices = 2
        return config
    return get_config

get_config = smaller(get_config)
"""
# As srun starts the two tasks of a step on two nodes; both are this machine.
SRUN = """#!/bin/bash
shift # --kill-on-bad-exit
export SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2
export SLURM_STEP_TASKS_PER_NODE="1(x2)" SLURM_LOCALID=0
for i in 0 1; do
  SLURM_PROCID=$i SLURM_NODEID=$i JSHARD_HOST=node$i "$@" &
done
code=0
for job in $(jobs -p); do wait $job || code=$?; done
exit $code
"""


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with a small recipe, and the interpreter where the scripts want it."""
    write_recipe(tmp_path, lambda recipe: recipe + TINY)
    (tmp_path / "tiny.py").rename(tmp_path / "gpt2_124m.py")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    write_script(python, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    return tmp_path


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def check(done: subprocess.CompletedProcess, run: Path) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done in") == 1, "process 0 alone prints"
    steps = {line["step"] for line in read_metrics(run)}
    assert steps == set(range(1, STEPS + 1))
    assert len(list((run / "logs").iterdir())) == 2


@pytest.mark.slow
def test_the_batch_script_trains_under_slurm(project):
    (project / "bin").mkdir()
    write_script(project / "bin" / "srun", SRUN)
    env = environment()
    job = {"SLURM_JOB_ID": str(free_port()), "PATH": f"{project}/bin:{env['PATH']}"}
    done = subprocess.run(
        ["bash", SCRIPTS / "train.sbatch"],
        cwd=project,
        env=env | job,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    check(done, project / "runs" / f"gpt-{job['SLURM_JOB_ID']}")
    assert "2 hosts: replica across, fsdp within them" in done.stdout
    log = (project / f"runs/gpt-{job['SLURM_JOB_ID']}/logs/process-1.log").read_text()
    assert "process 1 of 2 (SLURM)" in log


@pytest.mark.slow
def test_the_pods_of_the_jobset_train_together(project):
    (jobset,) = yaml.safe_load_all((SCRIPTS / "jobset.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["completionMode"] == "Indexed"
    # The name that the JobSet controller gives the first pod, and its service.
    name = jobset["metadata"]["name"]
    first = f"{name}-{replicated['name']}-0-0.{name}:8476"
    words = [
        word.replace(first, f"127.0.0.1:{port}").replace("/shared", str(project))
        for port in [free_port()]
        for word in container["command"]
    ]
    assert words != container["command"]
    assert f"--num_processes={job['completions']}" in words
    words[0] = sys.executable
    (secret,) = [variable["name"] for variable in container["env"]]
    pods = [
        subprocess.Popen(
            words,
            cwd=project,
            env=environment()
            | {"JOB_COMPLETION_INDEX": str(index), "JSHARD_HOST": f"pod{index}"}
            | {secret: "of kubectl create secret"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(job["completions"])
    ]
    out, err = zip(*(pod.communicate(timeout=120) for pod in pods), strict=True)
    codes = max(pod.returncode for pod in pods)
    done = subprocess.CompletedProcess(words, codes, "".join(out), "".join(err))
    check(done, project / "runs" / "gpt")
    log = (project / "runs/gpt/logs/process-1.log").read_text()
    assert "process 1 of 2 (Kubernetes)" in log


@pytest.mark.slow
def test_the_loop_over_ssh_trains(project):
    write_script(project / "rsh", '#!/bin/sh\nshift\nexec sh -c "$*"\n')
    done = subprocess.run(
        ["bash", SCRIPTS / "ssh.sh", "127.0.0.1", "127.0.0.2"],
        cwd=project,
        env=environment() | {"RSH": "./rsh", "PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    check(done, project / "runs" / "gpt")


def test_all_scripts_parse():
    for script in ("train.sbatch", "ssh.sh"):
        subprocess.run(["bash", "-n", SCRIPTS / script], check=True)
