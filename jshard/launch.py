"""Starts a job's processes: `python -m jshard.launch --num_processes=4 -- --config=F`.

On this machine, or by ssh on hosts that share a file system with it, one process each.
When the job fails, all processes are started again from its last checkpoint, if wished
with fewer hosts.

Exit codes: those of `jshard.train`; 1 where the job failed more often than allowed.
"""

import argparse
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jshard.cli.command import ArgumentParser, run_command, whole_number
from jshard.cli.paths import path_problem
from jshard.distributed.cluster import (
    ANY_PORT,
    LOCAL,
    OPTIONS,
    PORT_TAKEN,
    share_of_gpus,
)
from jshard.errors import RunFailed, UserError

ENDING = 75.0  # seconds for processes to end by themselves when one has failed
KILLING = 5.0  # and to end when they are killed
RSH = "ssh -o BatchMode=yes -o ServerAliveInterval=5"
PROBE = 15.0  # seconds for a host to answer
PASSED_ON = (
    "JAX_",
    "XLA_",
    "JSHARD_",
    "NCCL_",
    "CUDA_",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
)
PORTS = 20  # to try, where other programs have them
NO_RESTART = (0, 2, 75)  # done, bad input, preempted

# Runs a command where signals come as lines of standard input; its end, as when the
# connection is cut, kills the command.
_RUN = """
exec 3<&0
{command} </dev/null &
pid=$!
(while read -r name <&3; do kill -s "$name" $pid; done; kill -s KILL $pid) 2>/dev/null &
reader=$!
wait $pid
code=$?
kill $reader 2>/dev/null
exit $code
"""


def main() -> None:
    """Runs the command line; exits as the module says."""
    run_command(_launch)


def _launch(argv: list[str]) -> None:
    options, words = parse(argv)
    launcher = Launcher(options, words)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: launcher.stop())
    sys.exit(launcher.run())


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of the command, and the words of `jshard.train`.

    Raises:
      UserError: something lacks, or cannot be.
    """
    parser = ArgumentParser(
        prog="python -m jshard.launch",
        description="Starts the processes of a job, and starts them again.",
        epilog="After -- come the words of jshard.train.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    many, port = whole_number(1, 65_536), whole_number(1, 65_535)
    add("--num_processes", type=many, help="how many; by default one a host")
    add("--hosts", help="A,B,...: hosts to start them on; by default this machine")
    add("--rsh", default=RSH, help=f"runs a command on a host; {RSH}")
    add("--port", type=port, help="of the coordinator; by default any")
    add(
        "--max_restarts",
        type=whole_number(0, 1_000_000),
        default=0,
        help="how often to start again; 0",
    )
    add(
        "--min_hosts",
        type=many,
        help="go on with no fewer than so many; by default all",
    )
    cut = argv.index("--") if "--" in argv else len(argv)
    options, words = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    if not any(word.startswith("--config") for word in words):
        raise UserError("what to train? for example: ... -- --config=gpt.py")
    for word in words:
        if word.partition("=")[0].removeprefix("--") in OPTIONS:
            raise UserError(f"{word}: jshard.launch sets it itself")
    hosts = [] if options.hosts is None else options.hosts.split(",")
    _check_hosts(hosts, options)
    if options.num_processes is None and not hosts:
        raise UserError("how many processes? give --num_processes or --hosts")
    if options.num_processes is None:
        options.num_processes = len(hosts)
    if hosts and options.num_processes % len(hosts):
        raise UserError(
            f"--num_processes={options.num_processes} does not divide over the "
            f"{len(hosts)} hosts"
        )
    options.hosts = hosts
    if options.min_hosts is None:
        options.min_hosts = len(hosts)
    if not any(word.partition("=")[0] == "--workdir" for word in words):
        # The same in every try, which goes on where the last one ended.
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        words = [*words, f"--workdir=runs/launch-{stamp}"]
    return options, words


def _check_hosts(hosts: Sequence[str], options: argparse.Namespace) -> None:
    """Raises UserError for hosts that cannot be, or cannot be reached."""
    for host in hosts:
        if not re.fullmatch(r"[^\s-]\S{0,254}", host):
            raise UserError(
                f"--hosts={options.hosts}: {host!r} is no name of a host; must be "
                "A,B,... or USER@A,..."
            )
    if options.min_hosts is not None and options.min_hosts > len(hosts):
        raise UserError(
            f"--min_hosts={options.min_hosts}: must be at most the {len(hosts)} of "
            "--hosts"
        )
    try:
        words = shlex.split(options.rsh)
    except ValueError as error:
        raise UserError(f"--rsh={options.rsh}: {error}") from error
    if not words or path_problem(words[0]):
        raise UserError(f"--rsh={options.rsh}: must be a command, like {RSH}")
    if (hosts or options.rsh != RSH) and shutil.which(words[0]) is None:
        raise UserError(f"--rsh={options.rsh}: there is no command {words[0]}")


class Launcher:
    """Starts a job's processes, waits for them, and starts them again."""

    def __init__(self, options: argparse.Namespace, words: Sequence[str]):
        """Starts nothing yet.

        Args:
          options: of this command.
          words: of `jshard.train`.
        """
        self._options, self._words = options, list(words)
        self._hosts: list[str] = options.hosts
        self._each = options.num_processes // max(len(self._hosts), 1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked = False  # whether a signal asked for the end

    def run(self) -> int:
        """Runs the job to its end; returns its exit code."""
        tries = 1 + self._options.max_restarts
        for number in range(1, tries + 1):
            code = self._run_once()
            if code in NO_RESTART or self._asked:
                return code
            if number < tries:
                self._hosts = self._that_answer()
                if self._asked:  # meanwhile
                    return code
                _say(f"the job failed: restart {number} of {tries - 1}")
        if tries > 1:
            raise RunFailed(f"the job failed {tries} times: no more restarts")
        return 1

    def stop(self) -> None:
        """Asks all processes to save and stop; the second time it kills them."""
        self._send("KILL" if self._asked else "TERM")
        self._asked = True

    def _run_once(self) -> int:
        """Runs the job once, on the first port that is free.

        Raises:
          RunFailed: none is.
          UserError: the processes cannot share this machine's GPUs.
        """
        if not self._hosts:
            share_of_gpus(0, self._each, os.environ)  # told once, not by each of them
        first = self._hosts[0].rpartition("@")[2] if self._hosts else "127.0.0.1"
        for _ in range(PORTS):
            # Another one each time: the last one's may still be in use.
            port = self._options.port or random.randrange(20_000, 32_000)
            code = self._run_at(f"{first}:{port}")
            if code != PORT_TAKEN:
                return code
            if self._asked:  # meanwhile
                return 1
            _say(f"port {port} of {first} is taken: trying another")
        raise RunFailed(
            f"{PORTS} ports of {first} are taken: give a free one by --port"
        )

    def _run_at(self, coordinator: str) -> int:
        hosts = [host for host in self._hosts or [""] for _ in range(self._each)]
        self._processes = []
        for index, host in enumerate(hosts):
            words = [
                *self._words,
                f"--coordinator={coordinator}",
                f"--num_processes={len(hosts)}",
                f"--process_id={index}",
            ]
            local = f"{hosts[:index].count(host)}/{hosts.count(host)}"
            settings = {LOCAL: local} | ({} if self._options.port else {ANY_PORT: "1"})
            self._processes.append(self._start(host, words, settings))
        deadline = None
        while any(process.poll() is None for process in self._processes):
            time.sleep(0.1)
            codes = {process.poll() for process in self._processes}
            if PORT_TAKEN in codes:  # the others wait in vain
                self._kill()
            if deadline is None and codes - {None, 0, 75}:
                deadline = time.monotonic() + ENDING
            if deadline is not None and time.monotonic() > deadline:
                self._kill()
        ended, self._processes = self._processes, []  # nobody is left to signal
        for process in ended:
            assert process.stdin is not None
            process.stdin.close()
        codes = [process.wait() for process in ended]
        if self._hosts:  # what failed may be the connection, and say nothing
            self._tell_of_failures(codes)
        return _of_all(codes)

    def _tell_of_failures(self, codes: Sequence[int]) -> None:
        for index, code in enumerate(codes):
            if code not in (0, 75):
                host = self._hosts[index // self._each]
                _say(f"process {index} on {host} ended with exit code {code}")

    def _start(
        self, host: str, words: Sequence[str], settings: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Starts a process on a host, or here, with settings of its environment."""
        passed = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
        environ = {**passed, **settings} if host else settings
        assignments = [f"{name}={value}" for name, value in environ.items()]
        train = [sys.executable, "-m", "jshard.train", *words]
        run = f"exec {shlex.join(['env', *assignments, *train])}"
        if not host:
            command = ["sh", "-c", _RUN.format(command=run)]
        else:
            script = f"cd {shlex.quote(str(Path.cwd()))} && {run}"
            script = _RUN.format(command=f"sh -c {shlex.quote(script)}")
            command = [*shlex.split(self._options.rsh), host, script]
        return subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, start_new_session=True
        )

    def _send(self, name: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{name}\n".encode())
            except BrokenPipeError:  # it has ended
                continue

    def _kill(self) -> None:
        """Kills all processes, and then the connections to hosts that are dead."""
        self._send("KILL")
        until = time.monotonic() + KILLING
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _that_answer(self) -> list[str]:
        """The hosts that still run a command.

        Raises:
          RunFailed: they are too few.
        """
        answering = [host for host in self._hosts if self._answers(host)]
        missing = [host for host in self._hosts if host not in answering]
        if missing:
            _say(f"no answer from {', '.join(missing)}")
        if len(answering) < self._options.min_hosts:
            raise RunFailed(
                f"{len(answering)} of {len(self._hosts)} hosts answer, and --min_hosts="
                f"{self._options.min_hosts}: the same command goes on from the last "
                "checkpoint when they are back"
            )
        return answering

    def _answers(self, host: str) -> bool:
        command = [*shlex.split(self._options.rsh), host, "true"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, timeout=PROBE, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def _of_all(codes: Sequence[int]) -> int:
    """The exit code of a job: bad input and failures before all else."""
    for code in (PORT_TAKEN, 2, 130, 143):
        if code in codes:
            return code
    if all(code in (0, 75) for code in codes):
        return max(codes)
    return 1


def _say(text: str) -> None:
    print(f"jshard: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
