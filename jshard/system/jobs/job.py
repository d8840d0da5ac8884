"""Joins a process to its job: `with join(...) as peers`."""

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from jshard.system.compat.coordination import check_mtls
from jshard.system.errors import Preempted, UserError
from jshard.system.jobs.cluster import ANY_PORT, PORT_TAKEN, Cluster
from jshard.system.jobs.peers import Peers, Watched, print_line
from jshard.system.jobs.rendezvous import NAMED, RETRY, gathered
from jshard.system.jobs.schedulers import first_node
from jshard.system.jobs.status import end_with_parent, report
from jshard.system.network.secret import (
    SECRET_FILE,
    check_private_folder,
    given_secret,
)

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@contextlib.contextmanager
def join(cluster: Cluster | None) -> Iterator[Peers]:
    """Connects this process to its job, by `jax.distributed.initialize`.

    Within it all processes are monitored: when one fails, is killed or stopped, or
    cannot be reached, all end with exit code 1 within a few seconds more than
    `watch.silence`. A UserError in one ends all with 2. At the end the processes wait
    for each other and disconnect.

    Args:
      cluster: from `find_cluster`; None is a single process.

    Raises:
      UserError: the coordinator's port is taken, or processes were started with
        different numbers of processes, or with the same rank; or the secret is bad, or
        the name of SLURM's first node is not known.
      RunFailed: another process ended at its start, or did not come in five minutes.
      SystemExit: with 75, in all but process 0, when the job is preempted; with 98 if
        the port is taken and jshard.launch can pick another.
    """
    if cluster is None:
        yield Peers()
        return
    end_with_parent()
    report(phase="waiting")
    _check_node(cluster)
    check_mtls()
    secret = _find_secret(cluster)
    with gathered(cluster, _listen(cluster), secret), _without_proxies():
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            list(cluster.local_device_ids or ()),  # [] takes all devices, None only one
            coordinator_bind_address=_bind_address(cluster),
        )
        peers = _Distributed(cluster)
    try:
        with peers.telling():
            yield peers
    except Preempted:
        peers.leave(75)
        if peers.index == 0:
            raise
        sys.exit(75)
    except BaseException:
        peers.wait_for_end()
    peers.leave(0)


def _check_node(cluster: Cluster) -> None:
    """Checks that SLURM's first node, where JAX looks for process 0, has an address.

    JAX would wait for five minutes, and not say for whom.
    """
    if cluster.coordinator is not None or cluster.found_by != "SLURM":
        return
    node = first_node(os.environ)
    deadline = time.monotonic() + NAMED
    while True:
        try:
            socket.getaddrinfo(node, None)
            return
        except socket.gaierror as error:  # perhaps of a name server that is busy
            if time.monotonic() > deadline:
                raise UserError(
                    f"process 0 is on {node}, the first node of SLURM_STEP_NODELIST, "
                    f"and this machine knows no address of that name "
                    f"({error.strerror}): give --coordinator=HOST:PORT, with an "
                    f"address of {node} that all processes can reach and a free port"
                ) from error
        time.sleep(RETRY)


def _find_secret(cluster: Cluster) -> bytes:
    """Returns what the processes prove themselves with; empty if they were given none.

    Others can then come to the meeting, too, if a port leads there. Process 0 says so.
    """
    secret = given_secret()
    if cluster.socket is not None:  # which keeps other users out
        check_private_folder(
            Path(cluster.socket).parent, f"--coordinator={cluster.coordinator}"
        )
    elif cluster.coordinator and secret is None and not _is_local(cluster):
        if cluster.process_id == 0:
            print_line(
                f"warning: the job has no secret: whoever reaches "
                f"{cluster.coordinator} can take a process's place as it starts; give "
                f"all processes one by {SECRET_FILE}=FILE, of mode 600 (SECURITY.md)"
            )
    return secret or b""


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Hides proxies within it, through which gRPC would look for process 0.

    gRPC reads these variables when it opens a connection (its
    doc/environment_variables.md).
    """
    proxies = ("grpc_proxy", "http_proxy", "https_proxy")
    hidden = {x: os.environ.pop(x) for x in list(os.environ) if x.lower() in proxies}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _bind_address(cluster: Cluster) -> str | None:
    """Returns where process 0 listens; None is what JAX does, on all addresses.

    If the other processes reach it by this machine's own address, no other machine
    can. Users of this one can, and end the job: the service asks nobody who they are.
    JAX_COORDINATOR_BIND_ADDRESS narrows it for jobs of several hosts.
    """
    if cluster.socket is not None:
        return cluster.coordinator
    given = "JAX_COORDINATOR_BIND_ADDRESS" in os.environ
    return cluster.coordinator if _is_local(cluster) and not given else None


def _is_local(cluster: Cluster) -> bool:
    """Returns whether the processes reach each other by this machine's own address.

    A PyTorchJob gives process 0 such an address, and the others its name.
    """
    host = (cluster.coordinator or "").rpartition(":")[0]
    return host in LOOPBACK and cluster.found_by != "PyTorch"


def _listen(cluster: Cluster) -> socket.socket | None:
    """Listens on the coordinator's port, where JAX would abort in C++ if it cannot.

    None in all but process 0, and where JAX finds the coordinator.
    """
    if cluster.process_id or cluster.coordinator is None:
        return None
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    host = (bound or _bind_address(cluster) or "").rpartition(":")[0]
    try:
        if cluster.socket is not None:
            return socket.create_server(cluster.socket, family=socket.AF_UNIX)
        return listen(host.strip("[]"), int(cluster.coordinator.rpartition(":")[2]))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and ANY_PORT in os.environ:
            sys.exit(PORT_TAKEN)
        raise UserError(
            f"--coordinator={cluster.coordinator}: process 0 cannot listen there: "
            f"{os.strerror(error.errno or 0)}"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """Returns a server at an address; "" are all of this machine, port 0 is a free one.

    Raises:
      OSError: It cannot listen there.
    """
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    return socket.create_server(
        (host, port), family=family, backlog=1024, dualstack_ipv6=both
    )


class _Distributed(Watched):
    """A process of a job that `join` joined."""

    def __init__(self, cluster: Cluster):
        super().__init__(cluster.process_id, cluster.num_processes, cluster.found_by)
        _redirect_stdout(prints=self.index == 0)
        self._beats = self._start_heartbeat("beats")
        report(silence=self._silence)
        self._find_hosts()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Does nothing more: the processes are monitored since they joined."""
        yield

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except Preempted:
            raise
        except BaseException as error:
            if not self._reported.is_set():
                self._report_error(error)
            raise

    def leave(self, code: int) -> None:
        """Waits until all processes are ready to leave, and disconnects."""
        self._beats.leave()
        report(ending=code)
        jax.distributed.shutdown()


def _redirect_stdout(*, prints: bool) -> None:
    """Sends what C++ prints (Gloo does) to standard error, which the parent filters.

    In a process that prints nothing, Python's output goes there too, and to the log.
    """
    if prints:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
