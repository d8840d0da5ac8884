"""Whether the devices compute what they should: a step again on others, and copies.

``rolled`` moves a state and a batch to the next devices, ``sent`` hashes what each
device sends to others in a step, ``state_source`` keeps the state before it,
``replayed`` computes a step there and here, and ``verdict`` finds who differs.
``replicas`` compares arrays that several devices hold.
"""
