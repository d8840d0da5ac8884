"""Options of Hugging Face's Trainer, TRL and PEFT."""

TABLES = {
    "Hugging Face's Trainer": """
output_dir overwrite_output_dir logging_dir run_name -> --workdir=DIR
do_train -> none: jshard.train trains, and jshard.evaluate evaluates
do_eval eval_strategy evaluation_strategy eval_steps -> ~eval_every=N, where 0 is never
do_predict -> none: jshard.generate and Trainer.predict are for that
per_device_train_batch_size per_gpu_train_batch_size -> ~batch_size=N, that of all \
devices, in all ~policy.accumulate=K micro-batches
per_device_eval_batch_size per_gpu_eval_batch_size -> none: it is ~batch_size
auto_find_batch_size -> ~policy.accumulate=fit
gradient_accumulation_steps -> ~policy.accumulate=K, which divides ~batch_size
eval_accumulation_steps eval_do_concat_batches batch_eval_metrics \
eval_use_gather_object -> none: metrics are \
added up on the devices
eval_delay eval_on_start -> none: see ~eval_every
include_inputs_for_metrics include_for_metrics prediction_loss_only -> none: the \
recipe's loss_fn returns metrics
learning_rate -> ~optimizer.learning_rate=X
weight_decay -> ~optimizer.weight_decay=X
adam_beta1 -> ~optimizer.b1=X
adam_beta2 -> ~optimizer.b2=X
adam_epsilon -> ~optimizer.eps=X
max_grad_norm -> ~optimizer.clip_norm=X
num_train_epochs -> ~steps=Nepochs
max_steps -> ~steps=N
lr_scheduler_type -> ~optimizer.schedule=NAME: linear (polynomial, too), constant, \
cosine, cosine_with_restarts, wsd (warmup_stable_decay)
lr_scheduler_kwargs -> ~optimizer.final_fraction=X, ~optimizer.cycles=N or \
~optimizer.decay_steps=N
min_lr_rate -> ~optimizer.final_fraction=X
num_cycles -> ~optimizer.cycles=N
num_decay_steps -> ~optimizer.decay_steps=N
warmup_ratio -> ~optimizer.warmup_fraction=X
warmup_steps num_warmup_steps -> ~optimizer.warmup_steps=N \
~optimizer.initial_fraction=0; below 1 it is ~optimizer.warmup_fraction=X
optim optim_args adafactor optim_target_modules -> none: these recipes have AdamW; \
import one in a recipe of yours, with another make_optimizer
label_smoothing_factor -> ~model.label_smoothing=X
neftune_noise_alpha -> ~model.neftune_alpha=X in finetune.py, where a row has \
~data.sequence_length tokens
logging_steps logging_strategy logging_first_step -> ~log_every=N
logging_nan_inf_filter -> none: a loss that is not finite ends the run
log_level log_level_replica log_on_each_node disable_tqdm skip_memory_metrics debug \
-> none
include_tokens_per_second include_num_input_tokens_seen -> none: always logged
project trackio_space_id trackio_bucket_id trackio_static_space_id -> none: see \
~logger.wandb and ~logger.mlflow
report_to -> ~logger.wandb=PROJECT or ~logger.mlflow=EXPERIMENT; TensorBoard is always
save_steps save_strategy -> ~checkpoint.every=N, where 0 is never
save_total_limit -> ~checkpoint.keep=N
load_best_model_at_end -> RUN@best in place of RUN; in Python \
~checkpoint.load_best=True
metric_for_best_model -> ~checkpoint.best=eval_loss
greater_is_better -> ~checkpoint.best_is=highest
save_safetensors save_only_model -> none: jshard.export writes safetensors of a run
save_on_each_node -> none: all hosts write one checkpoint
resume_from_checkpoint -> the same --workdir, or ~checkpoint.restore=RUN for its \
parameters alone
ignore_data_skip restore_callback_states_from_checkpoint -> none: a run goes on where \
it was
use_cpu no_cuda use_mps_device -> JAX_PLATFORMS=cpu in the environment
data_seed -> ~seed=N
full_determinism -> ~deterministic=True
bf16 -> ~policy.precision.compute=bfloat16
fp16 -> ~policy.precision.compute=float16 ~policy.loss_scale=True
bf16_full_eval fp16_full_eval -> none: evaluations compute as training does
tf32 -> JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32 in the environment
half_precision_backend fp16_opt_level fp16_backend -> none
local_rank ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb tpu_num_cores \
ddp_broadcast_buffers ddp_static_graph ray_scope -> none: jshard.launch starts a \
job's processes
ddp_timeout -> ~watch.stuck=SECONDS
dataloader_drop_last dataloader_num_workers dataloader_prefetch_factor \
dataloader_pin_memory dataloader_persistent_workers dataloader_in_order \
dataloader_multiprocessing_context -> none: data is read ahead
remove_unused_columns label_names -> none: make_data says what is in a batch
train_sampling_strategy -> none: data is always shuffled
group_by_length length_column_name -> ~data.pack=True
fsdp fsdp_config -> none: layers are sharded; see ~mesh.fsdp, ~mesh.replica and \
~policy.reshard_after_forward
deepspeed accelerator_config parallelism_config -> none: see the keys ~mesh.fsdp and \
~policy.remat, and those beside them
gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing \
activation_checkpointing_kwargs -> ~policy.remat=full
torch_compile torch_compile_backend torch_compile_mode torchdynamo jit_mode_eval \
-> none: every step is compiled
torch_empty_cache_steps use_cache -> none
enable_jit_checkpoint -> none: a run saves and ends when it gets SIGTERM
use_liger_kernel liger_kernel_config -> none: the loss keeps no logits; see \
~model.loss_chunk
average_tokens_across_devices -> none: a loss is divided by the count of all devices
push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_revision \
hub_always_push -> none: jshard.export RUN --output=DIR --format=huggingface writes \
what `hf upload` takes
model_name_or_path config_name base_model_name_or_path -> ~model.from=DIR \
~checkpoint.restore=DIR, a folder or a name
tokenizer_name tokenizer_name_or_path -> ~data.tokenizer=DIR
dataset_name -> ~data.dataset=NAME
dataset_config_name dataset_config -> ~data.config=NAME
dataset_train_split -> ~data.split=NAME
train_file -> ~data.path=FILE
validation_file -> a file named validation beside the others in ~data.path=FOLDER
validation_split_percentage -> ~data.validation_fraction=X
max_eval_samples -> ~eval_batches=N
block_size -> ~data.sequence_length=N, or in recipes without that \
~model.sequence_length=N
torch_dtype -> ~policy.precision.param=DTYPE
attn_implementation -> ~model.attention=auto
load_in_4bit bnb_4bit_quant_type -> ~policy.precision.base=nf4
hidden_size -> ~model.width=N
num_hidden_layers -> ~model.num_layers=N
num_attention_heads -> ~model.num_heads=N
num_key_value_heads -> ~model.num_kv_heads=N
intermediate_size -> ~model.hidden=N
max_position_embeddings -> ~model.sequence_length=N
""",
    "TRL": """
dataset_text_field text_field -> ~data.text_key=NAME
max_length max_seq_length max_prompt_length max_completion_length max_target_length \
-> ~data.sequence_length=N, or in recipes without that ~model.sequence_length=N
packing eval_packing -> ~data.pack=True; with ~data.max_segments=2 a row has one \
document, as without packing
padding_free -> ~data.pack=True in finetune.py
packing_strategy -> none: ~data.pack fits the longest documents first
assistant_only_loss completion_only_loss -> ~data.train_on=answers, or all
activation_offloading -> ~policy.remat=offload:NAMES
chat_template_path -> none: it is chat_template.jinja in the folder of ~data.tokenizer
shuffle_dataset dataset_num_proc dataset_kwargs -> none: data is always shuffled
eos_token pad_token padding_value label_pad_token_id pad_to_multiple_of \
truncation_mode -> none
model_init_kwargs ref_model_init_kwargs -> none: see ~model.from
use_peft lora_r -> ~lora.rank=N, where 0 is none
lora_target_modules -> ~lora.targets=PATTERN,...
beta -> ~preference.beta=X
loss_type -> ~preference.loss=NAME in preference.py, where dpo is sigmoid; of texts \
nll alone
label_smoothing -> ~preference.label_smoothing=X, or of tokens ~model.label_smoothing=X
router_aux_loss_coef -> ~model.balance_weight=X
trust_remote_code precompute_ref_batch_size -> none
precompute_ref_log_probs -> ~preference.keep_reference=True
generate_during_eval -> ~sample.length=N
disable_dropout -> none: ~lora.dropout is there in preference.py, too
rpo_alpha ld_alpha f_divergence_type f_alpha_divergence_coef \
reference_free sync_ref_model ref_model_mixup_alpha ref_model_sync_steps \
force_use_ref_model model_adapter_name ref_adapter_name use_weighting loss_weights \
discopop_tau -> none
""",
    "PEFT": """
r -> ~lora.rank=N
lora_alpha -> ~lora.alpha=X
lora_dropout -> ~lora.dropout=X
target_modules -> ~lora.targets=NAME,... or all-linear
exclude_modules layers_pattern target_parameters -> none: see ~lora.targets
layers_to_transform -> ~lora.layers_to_transform=N,...
modules_to_save -> ~lora.modules_to_save=NAME,...
rank_pattern -> ~lora.rank_pattern=NAME:RANK,...
alpha_pattern -> ~lora.alpha_pattern=NAME:ALPHA,...
use_rslora -> ~lora.rslora=True
use_dora -> ~lora.dora=True
revision -> NAME@REVISION in ~checkpoint.restore
peft_type task_type auto_mapping peft_version inference_mode fan_in_fan_out -> none: \
jshard.export RUN --output=DIR --format=peft writes them
bias lora_bias trainable_token_indices ensure_weight_tying \
init_lora_weights loftq_config eva_config corda_config lora_ga_config \
layer_replication megatron_config megatron_core runtime_config velora_config \
alora_invocation_tokens use_qalora qalora_group_size monteclora_config use_bdlora \
arrow_config kasa_config -> none
""",
}
