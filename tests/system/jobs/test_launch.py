"""`python -m jshard.launch`: starts a job's processes, and starts them again."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

import jshard.launch
from failures import STEPS, slowly
from jobs import (
    children,
    environment,
    marked,
    write_recipe,
)
from jshard.system.jobs.shell_script import shell_script
from launched import WORDS, launch
from resumable import read_metrics


@pytest.mark.quick("words2", "words5")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_processes=2"], "no recipe to train"),
        (["--num_processes=2", "--", "--workdir=x"], "no recipe to train"),
        (
            ["--", "--config=tiny.py"],
            "how many processes? give --num_processes or --hosts",
        ),
        (
            ["--hosts=a,b", "--num_processes=3", "--", "--config=x"],
            "divisible by the number of --hosts, 2",
        ),
        (
            ["--hosts=a", "--", "--config=x", "--process_id=1"],
            "launch sets this itself",
        ),
        (
            ["--num_process=2", "--", "--config=x"],
            "did you mean --num_processes?",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(words, message, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jshard.launch", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


@pytest.mark.slow
def test_a_job_is_started_again_after_a_kill_and_computes_the_same(whole, tmp_path):
    write_recipe(tmp_path, slowly)
    with launch(tmp_path, "--num_processes=2", "--max_restarts=2") as job:
        job.wait_for_step(20)
        os.kill(job.worker(1), signal.SIGKILL)
        assert job.wait() == 0, job.err.read_text()
        assert marked(job.mark) == []
    assert "the job failed: restart 1 of 2" in job.err.read_text()
    assert "restart 2" not in job.err.read_text()
    assert "resuming run after step" in job.out.read_text()
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
def test_restarts_end_and_the_command_goes_on_later(tmp_path):
    def fail(recipe: str) -> str:
        late = "        if i == 100:\n            raise KeyError('bad example')\n"
        return slowly(recipe).replace("        time.sleep(0.02)\n", late)

    write_recipe(tmp_path, fail)
    with launch(tmp_path, "--num_processes=2", "--max_restarts=1") as job:
        assert job.wait() == 1
    err = job.err.read_text()
    assert err.count("error: make_data.<locals>.example() failed") == 2, err
    assert err.endswith("jshard: error: the job failed 2 times: no more restarts\n")


@pytest.mark.slow
def test_bad_input_is_not_started_again(tmp_path):
    write_recipe(tmp_path)
    words = [*WORDS, "--config.batch_size=7"]
    with launch(tmp_path, "--num_processes=2", "--max_restarts=3", words=words) as job:
        assert job.wait() == 2
    assert len(job.err.read_text().splitlines()) == 1
    assert "batch_size=7" in job.err.read_text()


@pytest.mark.slow
def test_a_signal_to_the_launcher_saves_and_stops_all(whole, tmp_path):
    write_recipe(tmp_path, slowly)
    options = ["--num_processes=2", "--max_restarts=3"]
    with launch(tmp_path, *options) as job:
        job.wait_for_step(20)
        job.process.send_signal(signal.SIGUSR1)
        assert job.wait(30) == 75, job.err.read_text()
        assert marked(job.mark) == []
    assert "saved; run the same command" in job.err.read_text()
    with launch(tmp_path, *options) as job:
        assert job.wait() == 0
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
def test_a_second_signal_kills_and_a_killed_launcher_leaves_nothing(tmp_path):
    write_recipe(tmp_path, slowly)
    for twice in (True, False):
        with launch(tmp_path, "--num_processes=2") as job:
            job.wait_for_step(20)
            if twice:
                job.process.terminate()
                time.sleep(0.1)
                job.process.terminate()
                assert job.wait(10) == 1
            else:
                job.process.kill()
            deadline = time.monotonic() + 15
            while marked(job.mark) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert marked(job.mark) == []
            if not twice:
                err = job.err.read_text()
                assert "the launcher is gone: process 0 saves and ends" in err
                assert "saved; run the same command" in err
        (tmp_path / "run" / "metrics.jsonl").unlink()


@pytest.mark.slow
def test_a_job_whose_shell_is_killed_is_saved_and_started_again(whole, tmp_path):
    write_recipe(tmp_path, slowly)
    with launch(tmp_path, "--num_processes=2", "--max_restarts=1") as job:
        job.wait_for_step(20)
        os.kill(int(children(job.process.pid)[0]), signal.SIGKILL)
        assert job.wait() == 0, job.err.read_text()
    err = job.err.read_text()
    assert "error: the shell of process 0 was ended by SIGKILL" in err
    assert "the job failed: restart 1 of 1" in err
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.fixture
def rsh(tmp_path) -> str:
    """Reaches hosts of this machine, until `dead/HOST` is there."""
    script = tmp_path / "rsh"
    script.write_text(
        f"""#!/bin/sh
        host=$1; shift
        if [ -e {tmp_path}/dead/$host ]; then exit 255; fi
        export JSHARD_HOST=$host
        exec sh -c "$*"
        """
    )
    script.chmod(0o755)
    (tmp_path / "dead").mkdir()
    return shlex.join([str(script)])


@pytest.mark.slow
def test_a_job_goes_on_with_the_hosts_that_are_left(rsh, tmp_path, monkeypatch):
    """Host names are addresses of this machine: all of 127.0.0.0/8 is."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    write_recipe(tmp_path, slowly)
    hosts = [f"127.0.0.{number}" for number in range(1, 5)]
    options = [f"--hosts={','.join(hosts)}", f"--rsh={rsh}", "--max_restarts=1"]
    words = [*WORDS[:2], "--config.mesh.cpu_devices=1", *WORDS[3:]]
    with launch(tmp_path, *options, "--min_hosts=2", words=words) as job:
        job.wait_for_step(20)
        for number in (2, 4):
            (tmp_path / "dead" / f"127.0.0.{number}").touch()
        for index in (1, 3):
            os.kill(job.worker(index), signal.SIGKILL)
        assert job.wait() == 0, job.err.read_text()
    assert "no answer from 127.0.0.2, 127.0.0.4" in job.err.read_text()
    mesh = re.findall(r"^mesh .*", job.out.read_text(), re.MULTILINE)
    assert "4 x cpu: replica 1 x fsdp 4; 4 hosts" in mesh[0]
    assert "2 x cpu: replica 1 x fsdp 2; 2 hosts" in mesh[1]
    assert list((tmp_path / "run/compiled").glob("jit_train_step-*"))
    assert job.out.read_text().count("caches programs for process 0 only") == 2
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_job_waits_for_no_host_it_cannot_do_without(rsh, tmp_path):
    write_recipe(tmp_path, slowly)
    options = ["--hosts=127.0.0.1,127.0.0.2", f"--rsh={rsh}", "--max_restarts=1"]
    with launch(tmp_path, *options) as job:
        job.wait_for_step(20)
        (tmp_path / "dead" / "127.0.0.2").touch()
        os.kill(job.worker(1), signal.SIGKILL)
        assert job.wait() == 1
    assert "1 of 2 hosts answer, and --min_hosts=2" in job.err.read_text()


def test_a_host_that_fails_without_a_word_is_named(tmp_path, capsys):
    script = tmp_path / "rsh"
    script.write_text("#!/bin/sh\nexit 255\n")
    script.chmod(0o755)
    words = ["--hosts=a,b", f"--rsh={script}", "--", "--config=tiny.py"]
    assert jshard.launch.Launcher(*jshard.launch.parse(words)).run() == 1
    assert capsys.readouterr().err.splitlines() == [
        "jshard: process 0 on a ended with exit code 255",
        "jshard: process 1 on b ended with exit code 255",
    ]


def test_a_connection_to_a_dead_host_is_given_up(tmp_path, monkeypatch):
    """Its `rsh` neither ends nor passes anything on."""
    script = tmp_path / "rsh"
    script.write_text("#!/bin/sh\nif [ $1 = b ]; then exec sleep 1000; fi\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(jshard.launch, "ENDING", 0.5)
    monkeypatch.setattr(jshard.launch, "KILLING", 0.5)
    words = ["--hosts=a,b", f"--rsh={script}", "--", "--config=tiny.py"]
    launcher = jshard.launch.Launcher(*jshard.launch.parse(words))
    since = time.monotonic()
    assert launcher.run() == 1
    assert time.monotonic() - since < 10


def test_of_a_process_that_ends_before_it_handles_signals_nothing_is_said(
    tmp_path, monkeypatch, capfd
):
    """The shell that runs it would write "User defined signal 2"."""
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\ncase "$*" in *process_id=0*) exit 2;; esac\nexec sleep 1000\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    words = ["--num_processes=2", "--", "--config=x"]
    assert jshard.launch.Launcher(*jshard.launch.parse(words)).run() == 2
    assert capfd.readouterr().err == ""


LISTENING = """\
#!/bin/sh
trap "" USR2
for name in HUP USR1 TERM; do
  trap "echo $name >> {heard}; exit 75" $name
done
echo started >> {heard}
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGHUP, "HUP"),
        (signal.SIGUSR1, "USR1"),
        (signal.SIGTERM, "TERM"),
        (signal.SIGINT, "TERM"),
    ],
)
def test_the_launcher_passes_signals_on(number, name, tmp_path, monkeypatch):
    heard, script = tmp_path / "heard", tmp_path / "python"
    script.write_text(LISTENING.format(heard=heard))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    numbers = (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    # As in a terminal: a job in the background of a shell ignores some.
    before = {n: signal.signal(n, signal.SIG_DFL) for n in numbers}

    def send() -> None:
        while not heard.exists() or heard.read_text().count("started") < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    try:
        with pytest.raises(SystemExit) as end:
            jshard.launch._launch(["--num_processes=2", "--", "--config=x"])
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert end.value.code == 75
    assert heard.read_text().split() == ["started"] * 2 + [name] * 2


def listening(folder, monkeypatch):
    """What two processes hear that are started in place of Python."""
    heard, script = folder / "heard", folder / "python"
    script.write_text(LISTENING.format(heard=heard))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return heard


def wait_until(true):
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true()


def test_a_process_whose_shell_is_killed_saves_and_ends_at_once_with_all(
    tmp_path, monkeypatch, capsys
):
    heard = listening(tmp_path, monkeypatch)
    words = ["--num_processes=2", "--", "--config=x"]
    launcher = jshard.launch.Launcher(*jshard.launch.parse(words))

    def kill() -> None:
        wait_until(lambda: heard.exists() and heard.read_text().count("started") == 2)
        launcher._processes[1].kill()

    threading.Thread(target=kill, daemon=True).start()
    since = time.monotonic()
    assert launcher.run() == 1
    assert time.monotonic() - since < 10  # not ENDING
    said = "jshard: error: the shell of process 1 was ended by SIGKILL\n"
    assert capsys.readouterr().err == said
    wait_until(lambda: heard.read_text().split() == ["started"] * 2 + ["TERM"] * 2)


def test_processes_whose_launcher_is_killed_save_and_end_at_once_and_say_so(
    tmp_path, monkeypatch
):
    heard = listening(tmp_path, monkeypatch)
    wrapped = [
        subprocess.Popen(
            ["sh", "-c", shell_script([sys.executable], index, 5)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    wait_until(lambda: heard.exists() and heard.read_text().count("started") == 2)
    for index, child in enumerate(wrapped):
        assert child.stdin is not None
        child.stdin.close()  # as the launcher's end does
        assert child.wait(5) == 75
        said = f"jshard: the launcher is gone: process {index} saves and ends\n"
        assert child.stderr is not None
        assert child.stderr.read() == said
        child.stderr.close()
    assert heard.read_text().split() == ["started"] * 2 + ["TERM"] * 2


def test_a_process_that_does_not_end_without_its_launcher_is_killed(tmp_path):
    script = shell_script(["sh", "-c", "trap '' TERM; echo on; sleep 60"], 0, 1)
    with subprocess.Popen(
        ["sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        child.stdin.close()
        assert child.wait(10) == 128 + signal.SIGKILL
        os.killpg(child.pid, signal.SIGKILL)  # the sleep


def test_a_signal_while_processes_are_started_reaches_all_of_them(
    tmp_path, monkeypatch
):
    heard = listening(tmp_path, monkeypatch)
    words = ["--num_processes=2", "--", "--config=x"]
    launcher = jshard.launch.Launcher(*jshard.launch.parse(words))
    start = launcher._start

    def start_slowly(*arguments):
        process, number = start(*arguments), len(launcher._processes)
        wait_until(lambda: heard.exists() and heard.read_text().count("\n") > number)
        if number == 0:
            launcher.stop()
        return process

    monkeypatch.setattr(launcher, "_start", start_slowly)
    assert launcher.run() == 75
    assert heard.read_text().split() == ["started"] * 2 + ["TERM"] * 2


def test_a_signal_between_two_tries_is_the_end(tmp_path, monkeypatch):
    script = tmp_path / "rsh"
    script.write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/started\nexit 1\n")
    script.chmod(0o755)
    words = ["--hosts=a", f"--rsh={script}", "--max_restarts=5", "--", "--config=x"]
    launcher = jshard.launch.Launcher(*jshard.launch.parse(words))

    def probe() -> list[str]:
        launcher.stop()
        return ["a"]

    monkeypatch.setattr(launcher, "_find_hosts", probe)
    assert launcher.run() == 1
    assert (tmp_path / "started").read_text() == "a\n"
