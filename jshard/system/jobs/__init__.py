"""Multi-process jobs: start-up, agreement between processes, and failures.

`cluster.find_cluster` finds out which process of the job this is,
`supervisor.supervise` runs it as a worker below a parent process, which imports no JAX,
and `job.join` connects it to the others.
"""
