"""Which ends and signals the launcher passes on, and what it says of them."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import jshard.launch
from jshard.system.jobs.shell_script import shell_script


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
    for child in wrapped:
        assert child.stdin is not None
        child.stdin.write("the job's secret\n")
        child.stdin.flush()
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
        child.stdin.write(b"the job's secret\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"on\n"
        child.stdin.close()
        assert child.wait(10) == 128 + signal.SIGKILL
        os.killpg(child.pid, signal.SIGKILL)  # the sleep


def test_a_process_whose_launcher_is_killed_before_it_starts_does_not_start(tmp_path):
    script = shell_script(["touch", str(tmp_path / "started")], 0, 1)
    done = subprocess.run(["sh", "-c", script], input=b"", check=False)
    assert done.returncode == 1
    assert not (tmp_path / "started").exists()


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
