"""Names of other libraries' options, in what is said of unknown keys and arguments."""

import re

import pytest

from jshard.recipe.config.overrides import read_words
from jshard.recipe.config.run_config import complete, declarations
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.trainer_arguments import config_of, recipe_of_parts
from jshard.system.cli.commands import COMMANDS
from jshard.system.cli.option_names import TABLES
from jshard.system.cli.other_libraries import answers_of, counterpart, keys_of
from jshard.system.errors import UserError
from jshard.train import COMMAND

# What users of each library set, from its documentation; the fields of dataclasses.
COMMON = {
    "Hugging Face's Trainer": """
        output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate
        lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args
        weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
        gradient_accumulation_steps average_tokens_across_devices max_grad_norm
        label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32
        gradient_checkpointing gradient_checkpointing_kwargs torch_compile
        torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config
        neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size
        logging_strategy logging_steps logging_first_step log_on_each_node
        logging_nan_inf_filter include_num_input_tokens_seen log_level
        log_level_replica disable_tqdm report_to run_name eval_strategy eval_steps
        eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
        eval_do_concat_batches eval_accumulation_steps include_for_metrics
        batch_eval_metrics save_only_model save_strategy save_steps
        save_on_each_node save_total_limit push_to_hub hub_token hub_private_repo
        hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end
        metric_for_best_model greater_is_better ignore_data_skip
        restore_callback_states_from_checkpoint full_determinism data_seed use_cpu
        accelerator_config parallelism_config dataloader_drop_last
        dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor remove_unused_columns label_names
        length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
        ddp_broadcast_buffers ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug
        skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
        """,
    "TRL": """
        model_init_kwargs chat_template_path dataset_text_field dataset_kwargs
        dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing
        packing_strategy padding_free pad_to_multiple_of eval_packing
        completion_only_loss assistant_only_loss loss_type activation_offloading
        pad_token router_aux_loss_coef trust_remote_code precompute_ref_batch_size
        loss_weights label_smoothing use_weighting discopop_tau ld_alpha
        ref_model_mixup_alpha ref_model_sync_steps f_alpha_divergence_coef
        beta max_prompt_length max_completion_length disable_dropout
        generate_during_eval precompute_ref_log_probs f_divergence_type sync_ref_model
        """,
    "PEFT": """
        r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias
        use_rslora modules_to_save init_lora_weights layers_to_transform layers_pattern
        rank_pattern alpha_pattern use_dora layer_replication megatron_config
        megatron_core trainable_token_indices loftq_config eva_config corda_config
        lora_ga_config velora_config alora_invocation_tokens use_qalora
        qalora_group_size monteclora_config runtime_config lora_bias target_parameters
        use_bdlora arrow_config kasa_config ensure_weight_tying task_type peft_type
        auto_mapping peft_version revision inference_mode
        """,
    "Lightning's Trainer": """
        accelerator strategy devices num_nodes precision logger callbacks fast_dev_run
        max_epochs min_epochs max_steps min_steps max_time limit_train_batches
        limit_val_batches limit_test_batches limit_predict_batches overfit_batches
        val_check_interval check_val_every_n_epoch num_sanity_val_steps
        log_every_n_steps enable_checkpointing enable_progress_bar enable_model_summary
        accumulate_grad_batches gradient_clip_val gradient_clip_algorithm
        benchmark use_distributed_sampler profiler detect_anomaly barebones plugins
        sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir
        """,
    "DeepSpeed": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        gradient_clipping zero_optimization.stage fp16.enabled bf16.enabled loss_scale
        initial_scale_power loss_scale_window hysteresis min_loss_scale lr betas
        warmup_num_steps total_num_steps steps_per_print wall_clock_breakdown
        communication_data_type prescale_gradients
        """,
    "MaxText": """
        base_output_directory run_name per_device_batch_size max_target_length
        learning_rate warmup_steps_fraction checkpoint_period eval_interval eval_steps
        remat_policy scan_layers ici_fsdp_parallelism dcn_data_parallelism weight_dtype
        adam_b1 adam_b2 adam_eps adam_weight_decay gradient_clipping_threshold
        """,
}
RECIPES = (
    "gpt.py", "finetune.py", "preference.py", "llama.py:3-8b", "bert.py",
    "imagenet_regnet.py",
)  # fmt: skip


@pytest.fixture(scope="module")
def keys():
    """The keys of packaged recipes, by recipe."""
    found = {}
    for name in RECIPES:
        with open_recipe(find_recipe(name)) as recipe:
            config = complete(recipe.get_config(), recipe.name)
            found[name] = set(declarations(config)) | {"model.from"}
    return found


@pytest.mark.parametrize("library", TABLES)
def test_what_is_said_of_another_librarys_names_are_keys_and_commands(keys, library):
    every, answers = set().union(*keys.values()), answers_of(library)
    assert {key for x in answers.values() for key in keys_of(x)} <= every
    said = " ".join(answers.values())
    assert set(re.findall(r"jshard\.(\w+)", said)) <= {*COMMANDS, "Trainer", "training"}
    assert not set(COMMON[library].split()) - set(answers)


def test_no_name_is_one_of_our_keys(keys):
    ours = set.intersection(*keys.values())
    assert not {name for x in TABLES for name in answers_of(x)} & ours


@pytest.fixture(scope="module")
def finetune():
    with open_recipe(find_recipe("finetune.py")) as recipe:
        return complete(recipe.get_config(), recipe.name)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("eval_steps", "Face's Trainer is --config.eval_every=N, where 0 is never; "),
        ("eval_steps", "eval_steps of MaxText is --config.eval_batches=N; --help"),
        ("save_steps", "is --config.checkpoint.every=N"),
        ("hub_model_id", "has no counterpart: jshard.export RUN --output=DIR"),
        ("training.adam_beta1", "; adam_beta1 of Hugging Face's Trainer is --config.o"),
        ("max-steps", "Trainer and Lightning's Trainer is --config.steps=N; --help"),
        ("lora.lora_alpha", "lora_alpha of PEFT is --config.lora.alpha=X; --help"),
        ("fp16.loss_scale", "--config.policy.loss_scale=True, which adapts; --help"),
        ("loss_scale_window", "DeepSpeed is --config.policy.loss_scale_window=N; --h"),
        ("initial_scale_power", "is --config.policy.loss_scale_start=X, 2**POWER; --"),
        ("optimizer.params.lr", "lr of DeepSpeed is --config.optimizer.learning_rate"),
        ("optimizer.warmup_step", "; did you mean optimizer.warmup_steps?; --help"),
        ("beta", "is --config.preference.beta=X; this recipe has no such key; --help"),
    ],
)
def test_an_unknown_key_of_another_library_is_answered_with_ours(finetune, key, said):
    with pytest.raises(UserError) as caught:
        read_words(finetune, {key: "1"}, "finetune")
    message = str(caught.value)
    assert message.startswith(f"unknown key --config.{key} in recipe finetune; ")
    assert said in message
    assert "\n" not in message


def test_an_argument_of_another_librarys_command_line_is_answered_with_ours():
    for word, said in (
        (
            "--output_dir=a",
            "'--output_dir=a'; output_dir of Hugging Face's Trainer is ",
        ),
        ("--learning-rate=1", "MaxText is --config.optimizer.learning_rate=X; see"),
        ("per_device_batch_size=8", "is --config.batch_size=N, that of all devices"),
        ("--workdri=a", "; did you mean --workdir?; see --help"),
    ):
        with pytest.raises(UserError) as caught:
            COMMAND.parse(["--config=gpt.py", word])
        assert said in str(caught.value)


def test_an_argument_of_another_librarys_trainer_is_answered_with_ours():
    with pytest.raises(UserError, match=r"'max_epochs'.* is config key steps=Nepochs"):
        recipe_of_parts(None, {"max_epochs": 3})
    with pytest.raises(UserError, match=r"'default_root_dir'.* is workdir=DIR"):
        recipe_of_parts(None, {"default_root_dir": "a"})
    parts = {
        "make_model": lambda config, rngs: None,
        "make_optimizer": lambda config: None,
        "loss_fn": lambda model, batch: None,
        "train_data": [],
    }
    recipe, _ = recipe_of_parts(None, parts)
    with pytest.raises(UserError, match=r"'log_every_n_steps'.* is log_every=N; keys"):
        config_of(recipe, {"steps": 1, "log_every_n_steps": 5}, None)


def test_a_name_of_no_library_is_answered_with_nothing():
    assert counterpart("optimizer.learnin_rate", "--config.") == ""
