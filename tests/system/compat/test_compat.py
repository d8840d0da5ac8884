"""What jshard uses of other packages' insides, and what breaks without it."""

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax._src import distributed, xla_bridge
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from jobs import free_port
from jshard.sharding.settings.mesh import make_mesh
from jshard.system.compat import (
    absent_gpus,
    flax_modules,
    jaxprs,
    orbax,
    plugin_log,
    xla_options,
)
from jshard.system.compat.coordination import KeyValueStore
from jshard.system.compat.cudnn_calls import packed_attention
from jshard.system.compat.programs import primitives

NAMED_TUPLES = {"_asdict", "_fields", "_replace"}  # documented
PACKAGE = Path(__file__).parents[3] / "jshard"
VERSION = f"JAX {jax.__version__}"


@contextlib.contextmanager
def otherwise(broken: str) -> Iterator[None]:
    """Says in words what is broken when what is inside fails."""
    try:
        yield
    except Exception as error:
        pytest.fail(f"{VERSION}: {broken} ({type(error).__name__}: {error})")


# JAX.


def test_coordination(monkeypatch):
    job = distributed.State()
    monkeypatch.setattr(distributed, "global_state", job)
    # In a process of its own it would come before devices.
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    with otherwise("jax.distributed has no key-value store where jshard looks for it"):
        jax.distributed.initialize(f"localhost:{free_port()}", 1, 0)
        store = KeyValueStore("a")
        assert store.all_in("b") == {}
        store.put("b/c", "first")
        store.put("b/c", "text")
        assert store.get("b/c", 1.0) == "text"
        assert store.all_in("b") == {"c": "text"}
        store.clear()
        assert store.all_in("b") == {}
    jax.distributed.shutdown()


def test_absent_gpus_are_traced():
    q = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    attend = lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn")
    with (
        otherwise("cuDNN's attention asks for its version in another place"),
        absent_gpus.cudnn_attention((9, 0), (9, 8, 0)),
    ):
        assert "dot_product_attention" in str(jax.make_jaxpr(attend)(q))


def test_packed_documents_are_attended_by_cudnn():
    q = jax.ShapeDtypeStruct((2, 8, 2, 64), jnp.bfloat16)
    starts, lengths = (jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (4, 3))
    attend = lambda q, starts, lengths: packed_attention(
        q, q, q, starts, lengths, scale=1.0, is_causal=True, window=4
    )
    with (
        otherwise("cuDNN's packed attention is called in another way"),
        absent_gpus.cudnn_attention((9, 0), (9, 8, 0)),
    ):
        text = str(jax.make_jaxpr(attend)(q, starts, lengths))
        assert "dot_product_attention" in text
        assert "sliding_window_length=4" in text


def test_absent_gpus_are_lowered_for():
    with (
        otherwise("cuDNN's attention cannot be lowered over an abstract mesh"),
        absent_gpus.cudnn_attention((9, 0), (9, 8, 0)),
    ):
        mesh = make_mesh().abstract_mesh
        spec = PartitionSpec("fsdp")
        attend = lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn")
        run = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec))
        traced = run.trace(jax.ShapeDtypeStruct((8, 8, 2, 64), jnp.bfloat16))
        assert "cudnn" in absent_gpus.lower(traced).as_text()


def test_absent_gpus_are_compiled_for():
    mesh = make_mesh()
    sharding = NamedSharding(mesh.abstract_mesh, PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    with otherwise("a program cannot be compiled for devices that it was not made on"):
        lowered = jax.jit(lambda x: x + 1).trace(x).lower(lowering_platforms=("cpu",))
        compiled = absent_gpus.compile_lowered(lowered, mesh)
        assert "num_partitions=8" in (compiled.as_text() or "")


def test_host_arrays_pass_for_device_arrays():
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    x = jax.device_put(jnp.arange(3.0), host)

    def read(x: jax.Array) -> jax.Array:
        typed = primitives.typed_as_device(x)
        assert jax.typeof(typed).memory_space == jax.memory.Space.Device
        return jax.device_put(typed, jax.memory.Space.Device) * 2

    with otherwise("policy.offload='all' has no primitive that types host arrays"):
        np.testing.assert_array_equal(jax.jit(read)(x), [0, 2, 4])


def traced(fn, *args) -> core.ClosedJaxpr:
    return jax.make_jaxpr(fn)(*args)


def test_jaxprs_lose_dead_code():
    closed = traced(lambda x, y: (x + 1, jnp.exp(y)), 1.0, 1.0)
    with otherwise("a program's dead code is removed by another function"):
        jaxpr, used = jaxprs.needed_for(closed.jaxpr, [True, False])
        assert used == [True, False]
        assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["add"]
        less = jaxprs.without_unused(traced(lambda x, y: x + 1, 1.0, np.ones(3)))
        assert len(less.jaxpr.invars) == 2


def test_jaxprs_name_calls_and_loops_as_before():
    scan = lambda c, x: lax.scan(lambda a, b: (a + b + c, a), c, x)
    with otherwise("a scan's inputs are in another order, or its body elsewhere"):
        (eqn,) = traced(scan, 1.0, np.ones(3)).jaxpr.eqns
        assert eqn.primitive.name == "scan"
        assert jaxprs.scan_sizes(eqn) == (1, 1)
        assert len(jaxprs.scan_body(eqn).invars) == 3
        assert {"length", "reverse", "unroll"} <= set(eqn.params)
    calls = {
        "jit": jax.jit(jnp.sin),
        "remat2": jax.checkpoint(jnp.sin),
        "custom_jvp_call": jax.nn.relu,
    }
    for name, call in calls.items():
        with otherwise(f"a call is not named {name!r}, or holds its program elsewhere"):
            eqn = next(e for e in traced(call, 1.0).jaxpr.eqns)
            found = (eqn.primitive.name, jaxprs.inner_jaxpr(eqn).jaxpr.eqns != [])
            assert found[0] in jaxprs.CALLS
            assert found[1]
            assert jaxprs.open_inner(eqn) is not None


def test_jaxprs_are_run_again():
    def fn(x):
        with jax.named_scope("here"):
            return jax.jit(jnp.sin)(x) * 2

    with otherwise("equations cannot be run again in the context they were traced in"):
        again = jaxprs.flat_jaxpr(traced(fn, 1.0), [1.0])
        assert [e.primitive.name for e in again.jaxpr.eqns] == ["sin", "mul"]
        assert "here" in str(again.jaxpr.eqns[0].source_info.name_stack)
        (result,) = core.jaxpr_as_fun(again)(0.5)
        assert result == fn(0.5)


def test_collectives_have_their_names():
    mesh, spec = make_mesh(), PartitionSpec("fsdp")

    def fn(x):
        gathered = lax.all_gather(x, "fsdp", tiled=True)
        scattered = lax.psum_scatter(gathered, "fsdp", tiled=True)
        swapped = lax.all_to_all(gathered, "fsdp", 0, 0, tiled=True)
        return scattered + lax.psum(x, "fsdp") + lax.pmax(x, "fsdp") + swapped[0]

    run = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)
    with otherwise("a collective has another name, or says elsewhere who takes part"):
        (eqn,) = traced(run, jnp.ones(8)).jaxpr.eqns
        inner = eqn.params["jaxpr"].eqns
        found = [e for e in inner if e.primitive.name in jaxprs.COLLECTIVES]
        assert len(found) == 5
        assert sum(e.primitive.name in jaxprs.SUMS for e in found) == 2
        assert {jaxprs.axes_of(e) for e in found} == {("fsdp",)}
        assert not any(map(jaxprs.groups_of, found))
    with otherwise("a shard_map holds its mesh, its specs or its axes elsewhere"):
        plus = lambda n, x: ([x + n], n)
        again = jaxprs.shard_map_again(eqn, plus)
        (result,), _ = again(1.0, jnp.ones(8))
        np.testing.assert_array_equal(result, 2 * np.ones(8))


def test_xla_options():
    with otherwise("XLA does not know an option of jshard's, or its type"):
        options = {name: value for name, (value, _) in xla_options.OPTIONS.items()}
        xla_options.check_options(options)


def test_plugin_log():
    with otherwise("users see a traceback where the CUDA plugin finds no GPU"):
        assert xla_bridge.logger.name == plugin_log.LOGGER
        source = Path(xla_bridge.__file__ or "").read_text()
        assert re.search(
            r'logger\.exception\(\s*"Jax plugin configuration error', source
        )


# Flax, Orbax.


class NoPytree(nnx.Module, pytree=False):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))


def test_flax_modules():
    class Late(NoPytree, pytree=True):
        pass

    module: Any = NoPytree()
    object.__setattr__(module, "__class__", Late)
    module.other = nnx.Param(jnp.ones(3))
    with otherwise("Flax records elsewhere which attributes hold arrays"):
        assert flax_modules.is_pytree(nnx.Linear)
        assert flax_modules.is_pytree(Late)
        assert not flax_modules.is_pytree(NoPytree)
        assert not flax_modules.is_pytree(dict)
        found = flax_modules.unrecorded(module)
        assert "w" in found
        assert "other" not in found
        undo = flax_modules.record(module, ["w"])
        assert "w" not in flax_modules.unrecorded(module)
        assert len(jax.tree.leaves(nnx.state(module))) == 2
        undo()
        assert "w" in flax_modules.unrecorded(module)


def test_orbax_files(tmp_path):
    value = np.arange(12.0).reshape(3, 4)
    ocp.save(tmp_path / "state", {"params": {"w": jnp.asarray(value)}})
    with otherwise("checkpoints cannot be exported: Orbax writes other files"):
        store = orbax.open_array(tmp_path / "state", "params.w")
        np.testing.assert_array_equal(store.read().result(), value)
        with pytest.raises(FileNotFoundError):
            orbax.open_array(tmp_path, "params.w")


def test_orbax_noise(caplog):
    orbax.silence()
    noise = Path(ocp.__file__).parent / "noise.py"
    code = "import absl.logging; absl.logging.{0}('{0} of Orbax')"
    for level in ("warning", "error"):
        exec(compile(code.format(level), str(noise), "exec"), {})
    absl.logging.error("not of Orbax")
    with otherwise("users see thousands of lines when a save fails"):
        assert "error of Orbax" not in caplog.text
        assert "not of Orbax" in caplog.text


# Nothing private elsewhere.

ALLOWED = {"os._exit"}  # Python's own, and documented
MODULES = re.compile(r"(^|\.)_(?!_)|^(jax\.interpreters|jaxlib)\b")
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "__setattr__"}
ATTRIBUTES = {"__closure__", "__code__", "cell_contents", "__version_info__"}


def private(tree: ast.AST) -> Iterator[str]:
    """Private names of others that a module imports or reads, with their lines."""
    nodes = list(ast.walk(tree))
    own = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    } | {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes:
        names, line = [], getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if MODULES.search(a.name)]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths = [f"{node.module}.{a.name}" for a in node.names]
            outside = node.module != "__future__"
            names = [path for path in paths if outside and MODULES.search(path)]
        elif isinstance(node, ast.Attribute):
            hidden = re.match(r"_(?!_)", node.attr) or node.attr in ATTRIBUTES
            public = node.attr in own or node.attr in NAMED_TUPLES
            names = [ast.unparse(node)] if hidden and not public else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.match(r"\w+\._src\b", node.value) else []
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) in BY_NAME
        ):
            text = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            names = [str(name) for name in text if re.match(r"_(?!_)", str(name))]
        yield from (f"{line}: {n}" for n in names if n not in ALLOWED)


CODE = [
    path
    for folder in ("jshard", "models", "train", "examples")
    for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
    if PACKAGE / "system/compat" not in path.parents
]


def test_no_other_room_has_private_calls():
    assert len(CODE) > 200
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{problem}"
        for path in CODE
        for problem in private(ast.parse(path.read_text()))
    ]
    assert not found, "give these a function in jshard/system/compat"


def test_what_is_allowed_and_looked_for_is_still_there():
    text = "\n".join(path.read_text() for path in CODE)
    assert [name for name in ALLOWED if name not in text] == []
    compat = "\n".join(p.read_text() for p in (PACKAGE / "system/compat").glob("*.py"))
    found = [n.partition(": ")[2] for n in private(ast.parse(compat))]
    assert any(MODULES.search(name) for name in found)
    assert any(name.rpartition(".")[2] in ATTRIBUTES for name in found)


@pytest.mark.parametrize(
    "code",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax.interpreters import mlir",
        "x._pytree__nodes",
        "lowered()._lowering",
        "jax.__version_info__",
        "logging.getLogger('jax._src.xla_bridge')",
        "getattr(module, '_pytree__nodes')",
    ],
)
def test_private_calls_are_found(code):
    assert list(private(ast.parse(code)))


def test_compat_imports_only_ground():
    for path in (PACKAGE / "system/compat").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "") >= "jshard":
                ours = (node.module or "").startswith("jshard")
                assert not ours or node.module in (
                    "jshard.system.errors",
                    "jshard.system.compat.versions",
                )


def test_the_class_of_an_object_changes_in_one_place():
    found = {
        path.relative_to(PACKAGE).as_posix(): text.count("__class__")
        for path in PACKAGE.rglob("*.py")
        if "__class__" in (text := path.read_text())
    }
    assert found == {"sharding/units/modules.py": 1}
