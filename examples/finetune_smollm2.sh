#!/usr/bin/env bash
# Teaches SmolLM2-135M to answer as a pirate, on eight CPU devices, and asks it something
# that is not among the sixteen questions of examples/pirate.jsonl. Three minutes on two
# cores, in an environment of its own; no GPU, no PyTorch, no hub.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash examples/get_smollm2.sh

.finetune/bin/python -m jshard.train --config=finetune.py --workdir=runs/pirate \
  --config.model.from=runs/smollm2 --config.checkpoint.restore=runs/smollm2 \
  --config.data.tokenizer=runs/smollm2 --config.data.path=examples/pirate.jsonl \
  --config.data.pack=True --config.data.sequence_length=64 \
  --config.data.validation_fraction=0 --config.batch_size=8 --config.steps=14 \
  --config.eval_every=0 --config.log_every=2 --config.sample.length=0 \
  --config.optimizer.learning_rate=2e-3 --config.optimizer.warmup_steps=2 \
  --config.policy.remat=none --config.policy.precision.compute=float32 \
  --config.lora.base_dtype=float32

.finetune/bin/python -m jshard.generate --model=runs/pirate --length=40 --temperature=0 \
  --prompt='<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is the capital of Italy?<|im_end|>
<|im_start|>assistant
'
