"""The start-up note."""


def describe(mesh, policy, state, model, batch):
    return "todo"
