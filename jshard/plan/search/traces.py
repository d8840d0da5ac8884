"""What is traced of a recipe once, for all candidates on all topologies.

A search has tens of thousands of candidates, and their configs differ in a few keys. So
each mesh, policy and state is made once, and each step traced once for each remat
policy; the rest of an estimate is arithmetic.
"""

import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.sharding import Mesh

from jshard.plan.fit.hardware import GPU
from jshard.plan.program import check_batch_size, trace
from jshard.plan.search.candidates import REMAT, RESHARD, Candidate
from jshard.plan.search.estimates import Activity, StateSize, activity, state_size
from jshard.plan.search.result_cache import hash_of, hash_of_sources, step_key
from jshard.recipe import contract
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.config.policy_keys import make_policy
from jshard.recipe.configured import Configured, configure
from jshard.recipe.definition import Recipe
from jshard.recipe.make_config import make_config
from jshard.sharding.settings import mesh as meshes
from jshard.sharding.settings.policy import Policy
from jshard.sharding.step.program.refusals import names_in
from jshard.system.errors import UserError
from jshard.system.formatting import one_line

Made = TypeVar("Made")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function, in the text of a program
_OFFLOAD = "policy.offload"
# Keys on which neither the size nor the placement of a state depends, but through the
# shape of the mesh; what is offloaded is known of each state.
_NOT_OF_STATE = frozenset(
    (
        REMAT,
        "policy.accumulate",
        "policy.defer_scatter",
        RESHARD,
        _OFFLOAD,
        "policy.precision.reduce",
        "policy.precision.sum",
        "batch_size",
    )
)


class Sized(NamedTuple):
    """A candidate on a mesh."""

    batch_size: int
    policy: Policy
    mesh: Mesh
    size: StateSize


class Step(NamedTuple):
    """What the trace of a step reveals, whatever the number of devices."""

    activity: Activity = Activity(0.0, 0.0, 0.0)
    names: tuple[str, ...] = ()  # of activations
    items: float = 0.0  # tokens (or examples) of an example
    unit: str = "tokens"
    error: str = ""  # why there is no trace
    digest: str = ""  # of its program


class Traces:
    """Traces of a recipe with the user's settings, values by key."""

    def __init__(self, recipe: Recipe, overrides: Mapping[str, Any]):
        """Remembers nothing yet."""
        self.recipe = recipe
        self.overrides = dict(overrides)
        self._known: dict[Hashable, Any] = {}

    def configured(self, settings: Mapping[str, Any] | None = None) -> Configured:
        """Returns the recipe with further settings; raises UserError."""
        values = {**self.overrides, **(settings or {})}
        make = lambda: configure(self.recipe, make_config(self.recipe, values))
        return self._once(("config", _key(values)), make)

    def step(self, topology: str, gpu: GPU, remat: str) -> Step:
        """Traces a step with a remat policy that reshards its layers.

        A host of GPUs of this capability will do, if it can run one, else as many as
        there are. Errors and warnings are left to the candidates' own traces.
        """

        def make() -> Step:
            why = ""
            host = f"{topology.rpartition(':')[0]}:{gpu.host}"
            for spec in dict.fromkeys((host, topology)):
                try:
                    with warnings.catch_warnings(action="ignore"):
                        made = self.configured({REMAT: remat, RESHARD: True})
                        program = trace(made, spec)
                except Exception as error:
                    why = one_line(f"{type(error).__name__}: {error}")
                    continue
                examples = made.settings.batch_size
                names = tuple(sorted({*names_in(program.jaxpr)}))
                items = program.items / examples
                digest = hash_of({"step": _ADDRESS.sub("", str(program.jaxpr))})
                active = activity(program)
                return Step(active, names, items, program.unit, digest=digest)
            return Step(error=why)

        return self._once(("step", gpu.capability, remat), make)

    def key(self, topology: str, gpu: GPU) -> str:
        """Returns a hash of what determines all results on a topology.

        It is empty if no step can be traced.
        """
        configured = self.configured()
        step = self.step(topology, gpu, configured.settings.policy.remat)
        if step.error:
            return ""
        sources = self._once("sources", hash_of_sources)
        return step_key(step.digest, configured.values, topology, gpu, sources)

    def axes(self, mesh_devices: Sequence[Any]) -> list[str]:
        """Returns the further axes of the mesh that the model and its plans take."""
        if len(mesh_devices) < 2:
            return []

        def takes(axis: str) -> bool:
            try:
                sizes: dict[str, Any] = {axis: 2}
                mesh = meshes.make_mesh(devices=mesh_devices, **sizes)
                with warnings.catch_warnings(action="ignore"):  # of its bubble
                    job = make_job(self.configured(), mesh.abstract_mesh)
                    job.abstract_state()
            except UserError:
                return False
            return True

        make = lambda: [axis for axis in meshes.AXES[2:] if takes(axis)]
        return self._once("axes", make)

    def sized(
        self, candidate: Candidate, topology: str, mesh_devices: Sequence[Any]
    ) -> Sized:
        """Returns a candidate's mesh of these devices, policy and size.

        Raises:
          UserError: it is invalid.
        """
        settings = candidate.settings
        policies = {k: x for k, x in settings.items() if k.startswith("policy.")}
        others = {k: x for k, x in settings.items() if k not in policies}
        configured = self.configured(others)
        policy = self._once(
            ("policy", _key(policies)),
            lambda: make_policy(configured.config, policies),
        )
        run = configured.settings
        make = lambda: make_mesh(run.mesh, mesh_devices)
        mesh = self._once(("mesh", topology, run.mesh), make)
        policy.check_groups(meshes.shards_of(mesh, split=True))
        check_batch_size(run.batch_size, policy.accumulate, mesh)
        shape = tuple(x for x in mesh.shape.items() if x[0] != meshes.REPLICA)
        of_state = {k: x for k, x in settings.items() if k not in _NOT_OF_STATE}
        of_state = {k: x for k, x in of_state.items() if not k.startswith("mesh.")}

        def sizes() -> dict[Any, StateSize]:
            made = self.configured({**settings, _OFFLOAD: None})
            # One for all meshes, as it is asked about layers once.
            optimizer = self._once(
                ("optimizer", _key(of_state)),
                lambda: contract.make_optimizer(
                    self.recipe.make_optimizer, made.config
                ),
            )
            job = make_job(made, mesh.abstract_mesh, optimizer=optimizer)
            state = job.abstract_state()
            return {x: state_size(state, x) for x in (None, "optimizer", "all")}

        found = self._once(("state", _key(of_state), shape), sizes)
        return Sized(run.batch_size, policy, mesh, found[policy.offload])

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Returns what was made of this key, or raises its UserError again."""
        if key not in self._known:
            try:
                self._known[key] = make()
            except UserError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, UserError):
            raise found
        return found


def _key(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Hashable:
    return frozenset((k, str(x)) for k, x in dict(values).items())  # 1 is not True
