"""The options that steps are compiled with on GPUs."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.config.policy_keys import parse_options
from jshard.recipe.config.run_config import complete
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.system.compat import xla_options

GIVEN = xla_options.OPTIONS | xla_options.FLOAT8_OPTIONS | xla_options.DETERMINISTIC


@pytest.mark.parametrize("name", GIVEN)
def test_the_installed_xla_knows_every_option_and_its_value(name):
    value, reason = GIVEN[name]
    xla_options.check_options({name: value})
    assert reason


def test_only_gpus_have_options():
    assert xla_options.compiler_options("cpu", 256) == {}
    assert set(xla_options.compiler_options("gpu", 256)) == set(xla_options.OPTIONS)


def test_some_options_are_for_meshes_of_many_devices():
    many = set(xla_options.LARGE_MESHES)
    assert many <= set(xla_options.OPTIONS)
    given = [set(xla_options.compiler_options("gpu", n)) for n in (8, 256)]
    assert given[1] - given[0] == many


def test_users_change_options_and_leave_some_to_xla():
    first, second, *_ = xla_options.OPTIONS
    changes = {first: None, second: False, "xla_gpu_autotune_level": 0}
    got = xla_options.compiler_options("gpu", 8, changes)
    assert first not in got
    assert got[second] is False
    assert got["xla_gpu_autotune_level"] == 0


def test_the_steps_of_an_fsdp_are_compiled_with_its_options():
    fsdp = jshard.FSDP(
        jshard.make_mesh(), compiler_options={"xla_cpu_no_such_option": 1}
    )
    make_model = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    loss_fn = lambda model, x: jshard.Mean(model(x).sum(), x.size)
    state = fsdp.abstract_state(make_model, optax.sgd(1.0))
    batch = np.ones((8, 8), np.float32)
    for step in (
        fsdp.train_step(loss_fn, optax.sgd(1.0)),
        fsdp.eval_step(loss_fn),
        fsdp.predict_step(lambda model, x: model(x)),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_no_such_option"):
            step.lower(state, batch).compile()


def test_a_config_sets_options_as_name_and_value():
    entries = ("xla_gpu_autotune_level=0", "xla_gpu_enable_triton_gemm=None")
    assert parse_options(entries) == {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_triton_gemm": None,
    }
    with open_recipe(find_recipe("gpt.py")) as recipe:
        config = complete(recipe.get_config(), "gpt.py")
        config.compiler_options = ("xla_cpu_enable_fast_math=True",)
        configured = configure(recipe, config)
        job = make_job(configured, make_mesh(configured.settings.mesh))
    assert job.fsdp.compiler_options == {"xla_cpu_enable_fast_math": True}


def test_a_deterministic_run_compiles_its_steps_with_xlas_option_for_it():
    option = "xla_gpu_deterministic_ops"
    with open_recipe(find_recipe("gpt.py")) as recipe:
        config = complete(recipe.get_config(), "gpt.py")
        for chosen in (False, True):
            config.deterministic = chosen
            configured = configure(recipe, config)
            job = make_job(configured, make_mesh(configured.settings.mesh))
            assert (option in job.fsdp.compiler_options) == chosen
        config.compiler_options = (f"{option}=False",)
        with pytest.raises(jshard.UserError, match=f"sets {option}=True, and comp"):
            make_job(configure(recipe, config), make_mesh(configured.settings.mesh))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("xla_gpu_autotune_level", "must be NAME=VALUE"),
        ("xla_gpu_no_such_thing=1", "xla_gpu_no_such_thing=1: JAX .* No such compile"),
        ("xla_gpu_autotune_level=high", "xla_gpu_autotune_level='high': JAX"),
    ],
)
def test_an_option_that_xla_does_not_know_is_one_line(entry, message):
    with pytest.raises(jshard.UserError, match=message) as error:
        parse_options((entry,))
    assert "\n" not in str(error.value)


def test_each_option_of_small_programs_is_one_of_this_jax():
    """XLA drops options; an optimizer's questions would all end in its error."""
    for name, value in xla_options.QUICK.items():
        add = jax.jit(lambda x: x + 1, compiler_options={name: value})
        assert add(1) == 2, name
