"""Plans of programs that are not jshard's: functions, and files that XLA wrote."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jshard
from h100 import h100s
from jshard.plan import plan as plan_function
from jshard.plan import plan_file
from jshard.plan.memory.breakdown import Memory, Part
from jshard.plan.output import plan_text
from jshard.plan.planning import Plan

OPTIMIZER = optax.adamw(1e-3)
LAYERS, WIDTH, CLASSES, EXAMPLES = 6, 64, 200, 64

FFT = """HloModule jit_fft, is_scheduled=true, \
entry_computation_layout={(c64[64,128,256])->c64[256,64,128]}, num_partitions=4

%wrapped_transpose_computation (param_0: c64[64,128,256]) -> c64[256,64,128] {
  %param_0 = c64[64,128,256]{2,1,0} parameter(0)
  ROOT %transpose.1 = c64[256,64,128]{2,1,0} transpose(%param_0), dimensions={2,0,1}
}

ENTRY %main (param: c64[64,128,256]) -> c64[256,64,128] {
  %param = c64[64,128,256]{2,1,0} parameter(0), metadata={op_name="field"}
  %fft.1 = c64[64,128,256]{2,1,0} fft(c64[64,128,256]{2,1,0} %param), fft_type=FFT, \
fft_length={256}, metadata={op_name="jit(fft)/fft[kind=FFT lengths=(256,)]"}
  %wrapped_transpose = c64[256,64,128]{2,1,0} fusion(%fft.1), kind=kInput, \
calls=%wrapped_transpose_computation
  %all-to-all-start = ((c64[256,64,128]{2,1,0}), c64[256,64,128]{2,1,0}) \
all-to-all-start(%wrapped_transpose), replica_groups={{0,1,2,3}}, dimensions={0}, \
metadata={op_name="jit(fft)/all_to_all"}
  %all-to-all-done = c64[256,64,128]{2,1,0} all-to-all-done(%all-to-all-start)
  ROOT %fft.2 = c64[256,64,128]{2,1,0} fft(%all-to-all-done), fft_type=FFT, \
fft_length={128}, metadata={op_name="jit(fft)/fft"}
}
"""
ARRAY = 64 * 128 * 256 * 8


def loss(params: Any, batch: Any) -> jax.Array:
    def layer(x, kernel):
        return jax.nn.gelu(x @ kernel), None

    x, _ = jax.lax.scan(layer, batch, params["layers"])
    return (x @ params["head"]).var()


def update(params: Any, opt_state: Any, batch: Any) -> Any:
    """As a user writes it who leaves the sharding to the compiler."""
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


train_step = jax.jit(update, donate_argnums=(0, 1))


def arguments(mesh: Any) -> tuple[Any, Any, Any]:
    """Abstract arguments of the step, sharded over a mesh with an axis "data"."""

    def array(*shape: int, dtype: Any = jnp.float32) -> Any:
        divided = ("data", *[None] * (min(len(shape), 2) - 1)) if shape else ()
        spec = PartitionSpec(*[None] * (len(shape) - len(divided)), *divided)
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = {"layers": array(LAYERS, WIDTH, WIDTH), "head": array(WIDTH, CLASSES)}
    opt_state = jax.eval_shape(OPTIMIZER.init, params)
    opt_state = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), opt_state)
    return params, opt_state, array(EXAMPLES, WIDTH)


def mesh_of(number: int) -> Any:
    return jax.make_mesh((number,), ("data",), devices=jax.devices()[:number])


def one_axis(mesh: Any) -> Any:
    return jax.sharding.Mesh(mesh.devices.reshape(-1), ("data",))


def parts(plan: Plan) -> dict[str, int]:
    return {part.name: part.bytes for part in plan.memory.parts}


@pytest.fixture(scope="module")
def step() -> Plan:
    return plan_function(train_step, *arguments(mesh_of(4)))


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "step.hlo"
        path.write_text(text)
        return path

    return write


def test_a_function_has_xlas_memory_by_the_names_of_its_arguments(step):
    compiled = train_step.lower(*arguments(mesh_of(4))).compile()
    sizes = compiled.memory_analysis()
    assert sizes is not None
    of_arguments = sizes.argument_size_in_bytes
    fresh = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    assert step.memory.exact
    assert step.memory.total == of_arguments + fresh + sizes.temp_size_in_bytes
    found = parts(step)
    sharded = 4 * (LAYERS * WIDTH**2 + WIDTH * CLASSES) // 4
    assert found["params.layers"] + found["params.head"] == sharded
    assert found["opt_state"] == 2 * sharded + 4
    assert found["batch"] == EXAMPLES * WIDTH
    assert found["results"] == 4  # the loss: the rest takes over the arguments
    what = {part.name: part.what for part in step.memory.parts}
    assert what["params.head"] == "1 argument, f32; 1 donated"
    assert what["batch"] == "1 argument, f32"
    assert "dot_general" in what["values of the backward"]


def test_a_function_has_the_collectives_that_the_compiler_chose(step):
    found = {(row.kind, row.dtype, row.group) for row in step.traffic.rows}
    assert found == {("all-gather", "f32", 4), ("all-reduce", "f32", 4)}
    assert step.timeline is None
    assert (step.devices, step.device_kind, step.name) == (4, "cpu", "update")


def test_a_lost_donation_is_seen_in_the_results(step):
    other = plan_function(update, *arguments(mesh_of(4)))
    assert (
        parts(other)["results"]
        == parts(step)["params.layers"]
        + parts(step)["params.head"]
        + parts(step)["opt_state"]
        + 4
    )


def test_what_is_alive_at_once_is_what_xla_reserves_but_for_gaps(step):
    assert 0 <= step.memory.unexplained < 0.05 * step.memory.total


def test_arguments_without_a_name_are_together(written):
    text = FFT.replace('op_name="field"', 'op_name="Arg_0.1"')
    assert parts(plan_file(written(text), "a100:4"))["arguments"] == ARRAY
    text = FFT.replace(', metadata={op_name="field"}', "")
    assert parts(plan_file(written(text), "a100:4"))["arguments"] == ARRAY


def test_values_in_the_memory_of_later_results_are_said():
    memory = Memory((Part("x", 3 * 2**20, ""),), 2 * 2**20, -(2**20), None, (), 1)
    assert [row[:3] for row in plan_text.memory_rows(memory)] == [
        ("x", "3.0 MiB", "150.0%"),
        ("shared", "-1.0 MiB", "-50.0%"),
        ("total", "2.0 MiB", ""),
    ]


def test_a_module_of_flax_is_planned_without_arrays():
    model = nnx.eval_shape(lambda: nnx.Linear(256, 256, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    found = plan_function(nnx.jit(lambda model, x: model(x)), model, x)
    assert parts(found)["model.kernel"] == 4 * 256 * 256
    assert parts(found)["model.bias"] == 4 * 256


def test_what_a_plan_does_not_know_is_said():
    def function(x):
        jax.debug.print("{}", x.sum())
        y = jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: 2 * x, x)
        return jax.lax.cond(y.sum() > 3, lambda y: y @ y, lambda y: y + 1, y)

    loops, branches, calls = plan_function(function, jnp.ones((8, 8))).notes
    assert loops.startswith("loops whose length XLA does not know count as one trip: 1")
    assert "jit(function)/while" in loops
    assert branches.startswith("all branches of a conditional count, of which one runs")
    assert calls.startswith("calls into Python count as no time")
    assert plan_function(lambda x: x @ x, jnp.ones((8, 8))).notes == ()


def test_a_file_of_a_gpus_program_has_memory_traffic_and_a_timeline(written):
    found = plan_file(written(FFT), "a100:4")
    assert parts(found) == {
        "field": ARRAY, "results": ARRAY, "other values": 2 * ARRAY,
    }  # fmt: skip
    assert not found.memory.exact
    (row,) = found.traffic.rows
    assert (row.kind, row.count, row.bytes) == ("all-to-all", 1, ARRAY * 3 // 4)
    assert found.timeline is not None
    kinds = [event.kind for event in found.timeline.events]
    assert kinds == ["memory", "memory", "all-to-all", "memory"]
    assert found.timeline.exposed > 0
    assert found.kind == "no products on A100"
    assert found.seconds_range is None


def test_the_command_prints_and_writes_a_files_plan(plan, written, tmp_path):
    path, files = written(FFT), {}
    words = ["--topology=a100:4", f"--from-hlo={path}"]
    for name in ("json", "html", "trace"):
        files[name] = tmp_path / f"plan.{name}"
        words.append(f"--{name}={files[name]}")
    code, out, _ = plan(*words)
    assert code == 0
    assert "step.hlo on 4 x NVIDIA A100-SXM4-80GB" in out
    assert "note: the memory is that of values alive at the same time" in out
    assert "memory (step) | fft (step)" in out  # the gap between them
    assert "fits: about 64.0 MiB of 75.3 GiB" in out
    data = json.loads(files["json"].read_text())
    assert (data["recipe"], data["mesh"], data["devices"]) == (None, None, 4)
    assert data["memory"]["exact"] is False
    assert data["timeline"]["items_per_second"] is None
    assert "What this plan does not know" in files["html"].read_text()
    assert len(json.loads(files["trace"].read_text())["traceEvents"]) > 4


def test_a_program_of_cpus_has_its_traffic_where_it_was_compiled(written):
    compiled = train_step.lower(*arguments(mesh_of(4))).compile()
    found = plan_file(written(compiled.as_text() or ""))
    direct = plan_function(train_step, *arguments(mesh_of(4)))
    assert found.traffic == direct.traffic
    assert parts(found) == parts(direct)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("module @jit_f {", "is StableHLO, from before compiling; give what compiled"),
        ("{}", "is no program of XLA: it does not begin with HloModule"),
        ("", "is no program of XLA"),
        (FFT.replace("is_scheduled=true, ", ""), "is not scheduled, so XLA has not"),
        (FFT.replace("{2,1,0}", "{2,1,0:T(8,128)}"), "is a program of a TPU"),
        (FFT.replace("num_partitions=4", "num_partitions=8"), "is for 8 devices"),
        (FFT[: len(FFT) * 2 // 3], "version of XLA, or cut off: %all-to-all-start"),
        (FFT.rsplit("}\n", 1)[0], "cut off: the file ends within a computation"),
        (
            FFT.replace("%all-to-all-start)", "%gone)"),
            "all-to-all-done reads gone, which is not before it in main",
        ),
        (FFT.replace("  %fft.1 = c64", "  %fft.1 := c64"), "line 10 is not understood"),
        (FFT.replace("{{0,1,2,3}}", "<4 of 4>"), "unknown form of device groups"),
        (FFT + "// __ynn_fusion", "XLA compiled this for CPUs"),
    ],
)
def test_files_that_are_no_gpus_program_are_one_line(plan, written, text, says):
    code, out, error = plan(f"--from-hlo={written(text)}", "--topology=a100:4")
    assert (code, out) == (2, "")
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from-hlo=/no/file"], "cannot be read: No such file or directory"),
        (["--from-hlo=/"], "cannot be read: Is a directory"),
        (["--config=gpt.py", "--from-hlo=x"], "--config: is of a recipe"),
        (["--config.steps=3", "--from-hlo=x"], "--config.KEY: is of a recipe"),
        (["--search", "--from-hlo=x"], "--search: is of a recipe"),
        (["--imbalance=2", "--from-hlo=x"], "--imbalance: is of a recipe"),
        ([], "--config=FILE is missing, or --from-hlo=FILE"),
    ],
)
def test_words_that_do_not_go_with_a_file_are_one_line(plan, words, says):
    code, _, error = plan("--topology=a100:4", *words)
    assert code == 2
    assert says in error
    assert error.count("\n") == 1


def test_a_function_with_too_much_data_in_it_is_refused():
    held = np.broadcast_to(np.float32(0), (2**20, 2**10))  # takes no memory
    x = jax.ShapeDtypeStruct((1,), jnp.float32)
    with pytest.raises(jshard.UserError, match=r"holds 4.0 GiB .* give them as arg"):
        plan_function(lambda x: x + held, x)


def test_a_copy_of_an_argument_has_its_name(written):
    name = r"state[\'model\'][\'kernel\'].value"
    called = "calls=%wrapped_transpose_computation"
    text = FFT.replace(called, f'{called}, metadata={{op_name="{name}"}}')
    assert "of state.model.kernel.value" in str(
        plan_file(written(text), "a100:4").memory.parts
    )


@pytest.mark.h100
def test_a_function_compiles_for_gpus_that_are_not_there():
    mesh = one_axis(h100s(8))
    found = plan_function(train_step, *arguments(mesh), topology="h100:8")
    assert found.fits
    assert found.timeline is not None
    assert found.timeline.seconds > 0
    assert {row.group for row in found.traffic.rows} == {8}
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    assert plan_function(lambda x: x @ x, x, topology="h100:1").timeline is not None


@pytest.mark.h100
def test_arguments_on_other_devices_are_refused():
    mesh = one_axis(h100s(8))  # or a skipped test
    with pytest.raises(jshard.UserError, match=r"on 4 x cpu, and the topology is h100"):
        plan_function(train_step, *arguments(mesh_of(4)), topology="h100:8")
    x, one = jax.ShapeDtypeStruct((64, 64), jnp.float32), "runs on one device and not"
    with pytest.raises(jshard.UserError, match=one):
        plan_function(lambda x: x, jnp.ones(8), topology="h100:8")
    here = NamedSharding(mesh_of(8), PartitionSpec("data"))
    with pytest.raises(jshard.UserError, match="runs on CPUs and not on h100:8"):
        plan_function(jax.jit(lambda x: x @ x, in_shardings=here), x, topology="h100:8")
    there = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=there)
    with pytest.raises(jshard.UserError, match="other devices in itself or in"):
        plan_function(jax.jit(lambda x: x @ x, in_shardings=here), x, topology="h100:8")


@pytest.mark.h100
def test_shardings_may_be_jits_alone():
    there = NamedSharding(one_axis(h100s(8)), PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    step = jax.jit(lambda x: x @ x, in_shardings=there)
    found = plan_function(step, x, topology="h100:8")
    assert [row.kind for row in found.traffic.rows] == ["all-gather"]


@pytest.mark.h100
def test_an_abstract_mesh_has_host_memory():
    mesh = one_axis(h100s(8)).abstract_mesh
    sharding = NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    found = plan_function(
        jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device) * 2),
        x,
        topology="h100:8",
    )
    assert [part.bytes for part in found.memory.host] == [64 * 64 * 4 // 8]
    with pytest.raises(jshard.UserError, match="over a mesh of 8 devices, and"):
        plan_function(jax.jit(lambda x: x), x, topology="h100:16")
