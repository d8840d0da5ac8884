"""Jobs of several processes: start-up, agreement on who is there, and failure.

`find_cluster` says which process this is, `supervise` keeps a parent over it, and
`join` makes it one of the job's.
"""

from jshard.distributed.cluster import Cluster, find_cluster
from jshard.distributed.peers import Peers, join
from jshard.distributed.status import has_parent
from jshard.distributed.supervisor import supervise

__all__ = ["Cluster", "Peers", "find_cluster", "has_parent", "join", "supervise"]
