"""Options of Lightning's Trainer, DeepSpeed and MaxText."""

TABLES = {
    "Lightning's Trainer": """
default_root_dir dirpath save_dir -> --workdir=DIR
max_epochs -> ~steps=Nepochs
min_epochs min_steps -> none: a run has ~steps=N updates
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
initial_scale_power -> ~policy.loss_scale_start=X, 2**POWER
loss_scale_window -> ~policy.loss_scale_window=N
hysteresis -> ~policy.loss_scale_hysteresis=N
min_loss_scale consecutive_hysteresis -> none: it falls to 1; only a doubled scale \
bears overflows again
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
context_parallel_strategy context_parallel_load_balance -> none: ~mesh.context \
exchanges heads, as its ulysses does
ici_context_usp_ulysses_parallelism dcn_context_usp_ulysses_parallelism \
-> ~mesh.context=N, that of its ring times these
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
