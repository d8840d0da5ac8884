"""Multi-process jobs: start-up, agreement between processes, and failures.

`find_cluster` finds out which process of the job this is, `supervise` runs it as a
worker below a parent process, and `join` connects it to the others.
"""

from jshard.distributed.cluster import Cluster, find_cluster
from jshard.distributed.job import join
from jshard.distributed.peers import Peers
from jshard.distributed.status import has_parent
from jshard.distributed.supervisor import supervise
from jshard.distributed.watched import Members

__all__ = [
    "Cluster",
    "Members",
    "Peers",
    "find_cluster",
    "has_parent",
    "join",
    "supervise",
]
