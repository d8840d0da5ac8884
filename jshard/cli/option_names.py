"""What options of other libraries are called here.

A line has names of a library, then what to write instead: `~` stands before a key of a
recipe, and "none" says that there is nothing to set.
"""

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
eval_accumulation_steps eval_do_concat_batches batch_eval_metrics -> none: metrics are \
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
num_train_epochs -> none: a run has ~steps=N updates
max_steps -> ~steps=N
lr_scheduler_type -> ~optimizer.schedule=NAME
lr_scheduler_kwargs -> ~optimizer.final_fraction=X, ~optimizer.cycles=N or \
~optimizer.decay_steps=N
min_lr_rate -> ~optimizer.final_fraction=X
num_cycles -> ~optimizer.cycles=N
num_decay_steps -> ~optimizer.decay_steps=N
warmup_ratio -> ~optimizer.warmup_fraction=X
warmup_steps num_warmup_steps -> ~optimizer.warmup_steps=N
optim optim_args adafactor optim_target_modules -> none: these recipes have AdamW; \
import one in a recipe of yours, with another make_optimizer
label_smoothing_factor -> ~model.label_smoothing=X
neftune_noise_alpha -> none: there is no noise on embeddings
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
load_best_model_at_end metric_for_best_model -> ~checkpoint.best=eval_loss
greater_is_better -> ~checkpoint.best_is=highest
save_safetensors save_only_model -> none: jshard.export writes safetensors of a run
save_on_each_node -> none: all hosts write one checkpoint
resume_from_checkpoint -> the same --workdir, or ~checkpoint.restore=RUN for its \
parameters alone
ignore_data_skip restore_callback_states_from_checkpoint -> none: a run goes on where \
it was
use_cpu no_cuda use_mps_device -> JAX_PLATFORMS=cpu in the environment
data_seed -> ~seed=N
full_determinism -> none: runs are deterministic
bf16 -> ~policy.precision.compute=bfloat16
fp16 -> ~policy.precision.compute=float16 ~policy.loss_scale=True
bf16_full_eval fp16_full_eval -> none: evaluations compute as training does
tf32 -> JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32 in the environment
half_precision_backend fp16_opt_level fp16_backend -> none
local_rank ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb tpu_num_cores \
ddp_broadcast_buffers ray_scope -> none: jshard.launch starts a job's processes
ddp_timeout -> ~watch.stuck=SECONDS
dataloader_drop_last dataloader_num_workers dataloader_prefetch_factor \
dataloader_pin_memory dataloader_persistent_workers -> none: data is read ahead
remove_unused_columns label_names -> none: make_data says what is in a batch
group_by_length length_column_name train_sampling_strategy -> ~data.pack=True
fsdp fsdp_config -> none: layers are sharded; see ~mesh.fsdp, ~mesh.replica and \
~policy.reshard_after_forward
deepspeed accelerator_config parallelism_config -> none: see the keys ~mesh.fsdp and \
~policy.remat, and those beside them
gradient_checkpointing gradient_checkpointing_kwargs -> ~policy.remat=full
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
packing eval_packing padding_free -> ~data.pack=True
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
loss_type -> ~preference.loss=NAME, where dpo is sigmoid
label_smoothing -> ~preference.label_smoothing=X, or of tokens ~model.label_smoothing=X
router_aux_loss_coef -> ~model.balance_weight=X
trust_remote_code precompute_ref_batch_size -> none
precompute_ref_log_probs -> ~preference.keep_reference=True
generate_during_eval -> ~sample.length=N
disable_dropout rpo_alpha ld_alpha f_divergence_type f_alpha_divergence_coef \
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
rank_pattern -> ~lora.rank_pattern=NAME:RANK,...
alpha_pattern -> ~lora.alpha_pattern=NAME:ALPHA,...
use_rslora -> ~lora.rslora=True
use_dora -> ~lora.dora=True
revision -> NAME@REVISION in ~checkpoint.restore
peft_type task_type auto_mapping peft_version inference_mode fan_in_fan_out -> none: \
jshard.export RUN --output=DIR --format=peft writes them
bias lora_bias modules_to_save trainable_token_indices ensure_weight_tying \
init_lora_weights loftq_config eva_config corda_config lora_ga_config \
layer_replication megatron_config megatron_core runtime_config velora_config \
alora_invocation_tokens use_qalora qalora_group_size monteclora_config use_bdlora \
arrow_config kasa_config -> none
""",
    "Lightning's Trainer": """
default_root_dir dirpath save_dir -> --workdir=DIR
max_epochs min_epochs min_steps -> none: a run has ~steps=N updates
max_steps -> ~steps=N
max_time -> none: a run saves and ends when it gets SIGTERM
accelerator -> JAX_PLATFORMS=cpu, or cuda, in the environment
devices num_nodes -> none: all devices of all processes; see jshard.launch
strategy -> none: layers are sharded; see ~mesh.fsdp and ~mesh.replica
precision -> ~policy.precision.compute=bfloat16
accumulate_grad_batches -> ~policy.accumulate=K, which divides ~batch_size
gradient_clip_val gradient_clip_algorithm -> ~optimizer.clip_norm=X
val_check_interval check_val_every_n_epoch -> ~eval_every=N
limit_val_batches num_sanity_val_steps -> ~eval_batches=N
limit_train_batches limit_test_batches limit_predict_batches overfit_batches -> none
fast_dev_run -> ~steps=2 ~eval_every=1 ~eval_batches=1
log_every_n_steps -> ~log_every=N
enable_checkpointing -> ~checkpoint.every=N, where 0 is never
every_n_train_steps -> ~checkpoint.every=N
monitor save_top_k -> ~checkpoint.best=eval_loss; ~checkpoint.keep counts the newest
ckpt_path -> the same --workdir, or ~checkpoint.restore=RUN for its parameters alone
logger -> ~logger.wandb=PROJECT or ~logger.mlflow=EXPERIMENT
callbacks -> none: on_step, on_evaluation and on_checkpoint of jshard.Trainer
patience -> none: jshard.training.early_stopping, given to jshard.Trainer
profiler -> ~profile.steps=FIRST:LAST
detect_anomaly -> none: a loss that is not finite ends the run
deterministic -> none: runs are deterministic
sync_batchnorm -> none: batch statistics are those of all devices
enable_progress_bar enable_model_summary benchmark use_distributed_sampler plugins \
barebones reload_dataloaders_every_n_epochs model_registry save_last -> none
""",
    "DeepSpeed": """
train_batch_size -> ~batch_size=N
train_micro_batch_size_per_gpu -> none: ~batch_size / devices / ~policy.accumulate
gradient_accumulation_steps -> ~policy.accumulate=K, which divides ~batch_size
gradient_clipping -> ~optimizer.clip_norm=X
steps_per_print -> ~log_every=N
zero_optimization zero_optimization.stage stage zero_stage -> none: stage 3 is the \
default, 2 is ~policy.reshard_after_forward=False, 1 is ~policy.defer_scatter=True, \
and 0 is ~mesh.fsdp=1 ~mesh.replica=DEVICES
offload_optimizer -> ~policy.offload=optimizer
offload_param -> ~policy.offload=all
zero_hpz_partition_size -> ~policy.reshard_after_forward=N
zero_quantized_weights -> ~policy.precision.gather=int8
zero_quantized_gradients communication_data_type -> ~policy.precision.reduce=bfloat16
mics_shard_size -> ~mesh.replica=M, the number of such groups of devices
overlap_comm stage3_prefetch_bucket_size -> ~policy.prefetch=True
reduce_bucket_size allgather_bucket_size contiguous_gradients sub_group_size \
round_robin_gradients prescale_gradients -> none: a collective is a layer
stage3_param_persistence_threshold -> ~policy.min_shard_elements=N
stage3_max_live_parameters stage3_max_reuse_distance -> ~policy.reshard_after_forward=N
stage3_gather_16bit_weights_on_model_save -> none: jshard.export --dtype=bfloat16
bf16.enabled -> ~policy.precision.compute=bfloat16
fp16.enabled -> ~policy.precision.compute=float16 ~policy.loss_scale=True
loss_scale -> ~policy.loss_scale=True, which adapts
initial_scale_power loss_scale_window hysteresis min_loss_scale consecutive_hysteresis \
-> none: with ~policy.loss_scale=True it starts at 2**15, is halved after a step that \
overflows, and doubled after 2000 that do not
bf16_optimizer_states -> ~optimizer.moment_dtype=bfloat16
activation_checkpointing number_checkpoints contiguous_memory_optimization \
-> ~policy.remat=full
partition_activations cpu_checkpointing -> ~policy.remat=offload:NAMES
autotp_size -> ~mesh.tensor=N
sequence_parallel_size -> ~mesh.context=N
ep_size -> ~mesh.expert=N
autotuning -> ~policy.remat=fit ~policy.accumulate=fit
wall_clock_breakdown flops_profiler comms_logger -> ~profile.steps=FIRST:LAST
lr -> ~optimizer.learning_rate=X
betas -> ~optimizer.b1=X ~optimizer.b2=X
eps -> ~optimizer.eps=X
warmup_num_steps -> ~optimizer.warmup_steps=N
warmup_min_lr warmup_min_ratio -> ~optimizer.initial_fraction=X, of the peak
warmup_max_lr -> ~optimizer.learning_rate=X
warmup_type -> none: a warm-up is linear
cos_min_ratio -> ~optimizer.final_fraction=X
total_num_steps -> ~steps=N
scheduler -> ~optimizer.schedule=NAME
tensorboard -> none: TensorBoard's files are always written
wandb -> ~logger.wandb=PROJECT
""",
    "MaxText": """
base_output_directory run_name -> --workdir=DIR
model_name -> --config=llama.py:SIZE
per_device_batch_size -> ~batch_size=N, that of all devices
gradient_accumulation_steps -> ~policy.accumulate=K, which divides ~batch_size
max_target_length -> ~model.sequence_length=N
learning_rate -> ~optimizer.learning_rate=X
lr_schedule_type -> ~optimizer.schedule=NAME
learning_rate_final_fraction cosine_learning_rate_final_fraction \
-> ~optimizer.final_fraction=X
warmup_steps_fraction -> ~optimizer.warmup_fraction=X
wsd_decay_steps_fraction -> ~optimizer.decay_steps=N
wsd_decay_style -> none: wsd falls as a cosine
learning_rate_schedule_steps -> none: a schedule is as long as ~steps
adam_b1 -> ~optimizer.b1=X
adam_b2 -> ~optimizer.b2=X
adam_eps adam_eps_root -> ~optimizer.eps=X
adam_weight_decay -> ~optimizer.weight_decay=X
mu_dtype -> ~optimizer.moment_dtype=bfloat16
opt_type -> none: import a recipe in one of yours, with another make_optimizer
gradient_clipping_threshold -> ~optimizer.clip_norm=X
checkpoint_period -> ~checkpoint.every=N
max_num_checkpoints_to_keep -> ~checkpoint.keep=N
enable_checkpointing -> ~checkpoint.every=N, where 0 is never
async_checkpointing -> none: always
load_parameters_path -> ~checkpoint.restore=RUN
load_full_state_path -> ~checkpoint.restore=RUN ~checkpoint.restore_optimizer=True
eval_interval -> ~eval_every=N
eval_steps -> ~eval_batches=N
log_period -> ~log_every=N
remat_policy -> ~policy.remat=full
scan_layers -> ~policy.unroll=True, the opposite
ici_fsdp_parallelism dcn_fsdp_parallelism -> ~mesh.fsdp=N
ici_data_parallelism -> ~mesh.replica=N
dcn_data_parallelism -> ~mesh.replica=hosts
ici_tensor_parallelism -> ~mesh.tensor=N
ici_context_parallelism ici_sequence_parallelism -> ~mesh.context=N
ici_expert_parallelism -> ~mesh.expert=N
ici_pipeline_parallelism -> ~mesh.pipe=N
logical_axis_rules -> none
shard_optimizer_over_data -> ~policy.defer_scatter=True
optimizer_memory_host_offload -> ~policy.offload=optimizer
parameter_memory_host_offload -> ~policy.offload=all
dtype -> ~policy.precision.compute=DTYPE
weight_dtype -> ~policy.precision.param=DTYPE
grad_dtype -> ~policy.precision.reduce=DTYPE
quantization -> ~policy.precision.products=float8
attention -> ~model.attention=auto
packing -> ~data.pack=True
max_segments_per_seq -> ~data.max_segments=N
dataset_type -> ~data.path=FILES or ~data.dataset=NAME
dataset_path hf_train_files grain_train_files -> ~data.path=FILES
hf_path -> ~data.dataset=NAME
tokenizer_path -> ~data.tokenizer=DIR
base_emb_dim -> ~model.width=N
base_num_query_heads -> ~model.num_heads=N
base_num_kv_heads -> ~model.num_kv_heads=N
base_mlp_dim -> ~model.hidden=N
base_num_decoder_layers -> ~model.num_layers=N
head_dim -> ~model.head_width=N
num_experts_per_tok -> ~model.experts_per_token=N
capacity_factor -> ~model.expert_capacity=X, which drops no token
dropout_rate enable_dropout -> ~model.dropout=X
z_loss_multiplier -> ~model.z_loss=X
data_shuffle_seed init_weights_seed -> ~seed=N
profiler_steps skip_first_n_steps_for_profiler -> ~profile.steps=FIRST:LAST
lora_rank -> ~lora.rank=N
""",
}
