"""Starts a job's processes: `python -m jshard.launch --num_processes=4 -- --config=F`.

On this machine, or one on each of several hosts, by ssh. The hosts share a file system.
If the job fails, all processes are restarted from its last checkpoint, with spare hosts
in the places of dead ones, or on fewer if need be and allowed.

`--command=generate`, `perplexity` and `evaluate` start these instead of `jshard.train`.

Exit codes: those of the command; 1 if the job failed more often than allowed.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jshard.system.cli.command import run_command
from jshard.system.cli.options import Command, Option
from jshard.system.cli.terminal import leave_closed_terminal, show
from jshard.system.errors import RunFailed, UserError
from jshard.system.jobs import cluster
from jshard.system.jobs.schedulers import LOCAL
from jshard.system.jobs.shell_script import shell_script
from jshard.system.jobs.supervisor import JOB_FAILED
from jshard.system.network.hosts import RSH, parse_hosts, parse_rsh, private_socket
from jshard.system.network.secret import SECRET, new_secret

ENDING = 75.0  # seconds for the other processes to end when one has failed
KILLING = 5.0  # seconds for processes to end when killed
PROBE = 15.0  # seconds for a host to answer
PASSED_ON = (
    "JAX_", "XLA_", "JSHARD_", "NCCL_", "CUDA_", "LD_LIBRARY_PATH", "PYTHONPATH",
)  # fmt: skip
PORTS = 20  # ports to try if other programs use them
TRAIN = "train"
COMMANDS = (TRAIN, "generate", "perplexity", "evaluate")  # in several processes
NO_RESTART = (0, 2, 75)  # done, bad input, preempted
_MANY: dict[str, Any] = {"kind": int, "at_least": 1, "at_most": 65_536}

COMMAND = Command(
    "launch",
    "Starts the processes of a job and restarts them after failures. Arguments after "
    "-- are passed to the command.",
    {
        "command": Option(TRAIN, "the command to start", choices=COMMANDS),
        "num_processes": Option(
            None, "how many processes in total; by default one per host", **_MANY
        ),
        "hosts": Option(
            None, "hosts to run on; by default this machine", kind=str, shown="A,B,..."
        ),
        "spare_hosts": Option(
            None, "the hosts that replace dead ones", kind=str, shown="A,B,...",
        ),
        "rsh": Option(RSH, "the command that reaches a host", shown="COMMAND"),
        "port": Option(
            None, "port of the coordinator; by default any free one, and none on this "
            "machine",
            kind=int, at_least=1, at_most=65_535,
        ),
        "max_restarts": Option(
            0, "how often to restart a failed job", at_least=0, at_most=10**6
        ),
        "min_hosts": Option(
            None, "the smallest number of hosts to restart on; by default all", **_MANY
        ),
    },
)  # fmt: skip


def main() -> None:
    """Runs the command line; see the module for exit codes."""
    run_command(_launch)


def _launch(argv: list[str]) -> None:
    launcher = Launcher(*parse(argv))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: launcher.stop(number))
    sys.exit(launcher.run())


def parse(argv: list[str]) -> tuple[SimpleNamespace, list[str]]:
    """Returns the options of this command and the arguments for the one it starts.

    Raises:
      UserError: an option is missing or invalid.
    """
    cut = argv.index("--") if "--" in argv else len(argv)
    options, words = COMMAND.parse(argv[:cut]), argv[cut + 1 :]
    options.hosts = parse_hosts("hosts", options.hosts)
    options.spare_hosts = parse_hosts("spare_hosts", options.spare_hosts)
    options.rsh = parse_rsh(options.rsh)
    trains = options.command == TRAIN
    if trains and not any(word.startswith("--config") for word in words):
        raise UserError("no recipe to train; for example: ... -- --config=gpt.py")
    for word in words:
        if word.partition("=")[0].removeprefix("--") in cluster.OPTIONS:
            raise UserError(f"{word}: jshard.launch sets this itself")
    hosts = len(options.hosts)
    if hosts and shutil.which(options.rsh[0]) is None:
        raise UserError(f"--rsh: there is no command {options.rsh[0]}")
    if options.min_hosts is None:
        options.min_hosts = hosts
    elif options.min_hosts > hosts:
        raise UserError(
            f"--min_hosts={options.min_hosts}: must be at most the number of --hosts, "
            f"{hosts}"
        )
    if options.num_processes is None and not hosts:
        raise UserError("how many processes? give --num_processes or --hosts")
    if options.num_processes is None:
        options.num_processes = hosts
    elif hosts and options.num_processes % hosts:
        raise UserError(
            f"--num_processes={options.num_processes}: must be divisible by the number "
            f"of --hosts, {hosts}"
        )
    if trains and not any(word.partition("=")[0] == "--workdir" for word in words):
        # The same for all restarts, which resume from its checkpoints.
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        words = [*words, f"--workdir=runs/launch-{stamp}"]
    return options, words


class Launcher:
    """Starts a job's processes, waits for them, and restarts them.

    Args:
      options: of this command, from `parse`.
      words: arguments for the command that is started.
    """

    def __init__(self, options: SimpleNamespace, words: Sequence[str]):
        self._options, self._words = options, list(words)
        self._hosts: list[str] = options.hosts
        self._each = options.num_processes // max(len(self._hosts), 1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked = False  # whether a signal asked the job to end
        self._demanded = False  # whether that was SIGTERM or Ctrl-C
        self._starting = False  # whether not all processes are started yet
        self._early: list[int] = []  # signals that came meanwhile

    def run(self) -> int:
        """Runs the job to its end, with restarts; returns its exit code."""
        restarts = self._options.max_restarts
        for number in range(restarts + 1):
            code = self._run_once()
            if code in NO_RESTART or self._asked:
                return code
            if number < restarts:
                self._hosts = self._find_hosts()
                if self._asked:  # meanwhile
                    return code
                _say(f"the job failed: restart {number + 1} of {restarts}")
        if restarts:
            raise RunFailed(f"the job failed {restarts + 1} times: no more restarts")
        return 1

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Asks all processes to save and stop, as a signal to this one does.

        SIGHUP and SIGUSR1 are passed on. The second SIGTERM or SIGINT kills them.
        """
        self._asked = True
        if self._starting:  # a process that is about to start would miss it
            self._early.append(number)
            return
        if number in (signal.SIGHUP, signal.SIGUSR1):
            leave_closed_terminal()
            self._send(signal.Signals(number).name.removeprefix("SIG"))
            return
        self._send("KILL" if self._demanded else "TERM")
        self._demanded = True

    def _run_once(self) -> int:
        """Runs the job once: on a socket of this machine, or a port that is free."""
        if not self._hosts:  # checked here so that not every process reports it
            cluster.share_of_gpus(0, self._each, os.environ)
        if not self._hosts and not self._options.port:
            with private_socket() as address:
                return self._run_at(address)
        first = self._hosts[0].rpartition("@")[2] if self._hosts else "127.0.0.1"
        for _ in range(PORTS):
            # A new one for each run, as the previous one may still be in use.
            port = self._options.port or random.randrange(20_000, 32_000)
            code = self._run_at(f"{first}:{port}")
            if code != cluster.PORT_TAKEN:
                return code
            if self._asked:  # meanwhile
                return 1
            _say(f"port {port} of {first} is taken: trying another")
        raise RunFailed(
            f"{PORTS} ports of {first} are taken: give a free one by --port"
        )

    def _run_at(self, coordinator: str) -> int:
        hosts = [host for host in self._hosts or [""] for _ in range(self._each)]
        self._processes, self._starting = [], True
        secret = new_secret()
        for index, host in enumerate(hosts):
            words = [
                *self._words,
                f"--coordinator={coordinator}",
                f"--num_processes={len(hosts)}",
                f"--process_id={index}",
            ]
            settings = {LOCAL: f"{hosts[:index].count(host)}/{hosts.count(host)}"}
            if not self._options.port:
                settings[cluster.ANY_PORT] = "1"
            process = self._start(index, host, words, settings, secret)
            self._processes.append(process)
        self._starting = False
        while self._early:
            self.stop(self._early.pop(0))
        deadline = float("inf")
        reported = False
        while any(process.poll() is None for process in self._processes):
            time.sleep(0.1)
            codes = {process.poll() for process in self._processes}
            if codes - {None, 0, 75}:
                deadline = min(deadline, time.monotonic() + ENDING)
                if not reported:
                    self._tell_of_failure()
                reported = True
            # Without process 0's port the other processes would wait for nothing.
            if cluster.PORT_TAKEN in codes or time.monotonic() > deadline:
                self._kill()
        ended, self._processes = self._processes, []  # a signal finds no process now
        for process in ended:
            assert process.stdin is not None
            process.stdin.close()
        codes = [process.wait() for process in ended]
        for index, code in enumerate(codes):
            # With hosts, the connection may have failed, which prints nothing.
            if self._hosts and code not in (0, 75):
                _say(f"process {index} on {hosts[index]} ended with exit code {code}")
        for code in (cluster.PORT_TAKEN, 2, 130, 143):
            if code in codes:
                return code
        return max(codes) if set(codes) <= {0, 75} else 1

    def _tell_of_failure(self) -> None:
        """Says if a process was killed, and ends those that still wait for it."""
        for index, process in enumerate(self._processes):
            code = process.poll()
            # As shells return it. Other signals are told by who gets them.
            if code == 128 + signal.SIGKILL and not self._asked:
                _say(f"error: process {index} was ended by SIGKILL")
            elif code is not None and code < 0:
                way = "connection" if self._hosts else "shell"
                name = signal.Signals(-code).name
                _say(f"error: the {way} of process {index} was ended by {name}")
                self._send("TERM")  # that process may run without it: all save and end
        self._send(JOB_FAILED.name.removeprefix("SIG"))

    def _start(
        self,
        index: int,
        host: str,
        words: Sequence[str],
        settings: Mapping[str, str],
        secret: str,
    ) -> subprocess.Popen[bytes]:
        """Starts a process on a host, or here, with more environment variables."""
        passed = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
        passed.pop(SECRET, None)  # it would be on the command line
        environ = {**passed, **settings} if host else settings
        assignments = [f"{name}={value}" for name, value in environ.items()]
        command = [sys.executable, "-m", f"jshard.{self._options.command}", *words]
        words = ["env", *assignments, *command]
        if host:
            script = shell_script(words, index, ENDING, Path.cwd())
            started = [*self._options.rsh, host, script]
        else:
            started = ["sh", "-c", shell_script(words, index, ENDING)]
        process = subprocess.Popen(
            started, bufsize=0, stdin=subprocess.PIPE, start_new_session=True
        )
        self._write(process, secret)
        return process

    def _send(self, name: str) -> None:
        for process in self._processes:
            self._write(process, name)

    def _write(self, process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            process.stdin.write(f"{line}\n".encode())

    def _kill(self) -> None:
        """Kills all processes, and then connections to hosts that do not respond."""
        self._send("KILL")
        until = time.monotonic() + KILLING
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _find_hosts(self) -> list[str]:
        """Returns the hosts that still run a command; raises RunFailed if too few."""
        missing = [host for host in self._hosts if not self._answers(host)]
        if missing:
            _say(f"no answer from {', '.join(missing)}")
        unused = (x for x in self._options.spare_hosts if x not in self._hosts)
        spares = filter(self._answers, unused)  # asked when one is needed
        places = [next(spares, "") if x in missing else x for x in self._hosts]
        answering = list(filter(None, places))
        if len(answering) < self._options.min_hosts:
            raise RunFailed(
                f"{len(answering)} of {len(self._hosts)} hosts answer, and --min_hosts="
                f"{self._options.min_hosts}: the same command resumes from the last "
                "checkpoint when they are back"
            )
        return answering

    def _answers(self, host: str) -> bool:
        command = [*self._options.rsh, host, "true"]
        nothing = subprocess.DEVNULL
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.call(command, stdin=nothing, timeout=PROBE) == 0
        return False


def _say(text: str) -> None:
    show(f"jshard: {text}", error=True)


if __name__ == "__main__":
    main()
