"""Connections between the processes of a job, which prove who they are.

`secret` is what they have in common, `authenticated` how they prove it, and `hosts`
where they are.
"""
