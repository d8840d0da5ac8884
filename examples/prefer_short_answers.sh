#!/usr/bin/env bash
# Teaches SmolLM2-135M to stop after a sentence, by ORPO, on two CPU devices. In each of the
# sixteen pairs of examples/short_answers.jsonl the model itself wrote both answers: the
# rejected one is its first two sentences, and the chosen one the first alone. Then it is
# asked what is not among them, before and after. Under three minutes on two cores; no GPU,
# no PyTorch, no hub.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash examples/get_smollm2.sh

.finetune/bin/python -m jshard.train --config=preference.py --workdir=runs/short \
  --config.model.from=runs/smollm2 --config.checkpoint.restore=runs/smollm2 \
  --config.data.tokenizer=runs/smollm2 --config.data.path=examples/short_answers.jsonl \
  --config.data.sequence_length=72 --config.data.validation_fraction=0 \
  --config.preference.loss=orpo --config.preference.beta=1 \
  --config.optimizer.learning_rate=5e-4 --config.optimizer.warmup_steps=1 \
  --config.batch_size=4 --config.steps=10 --config.eval_every=0 --config.log_every=2 \
  --config.sample.length=0 --config.mesh.cpu_devices=2 --config.policy.remat=none \
  --config.policy.precision.compute=float32 --config.lora.base_dtype=float32

.finetune/bin/python - <<'PYTHON' >runs/questions.jsonl
import json

for question in "Tell me about elephants.", "What is electricity?", "What is snow?":
    chat = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        f"Hugging Face<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    print(json.dumps({"prompt": chat}))
PYTHON
for model in smollm2 short; do
  .finetune/bin/python -m jshard.generate --model=runs/$model --prompts=runs/questions.jsonl \
    --length=64 --temperature=0 --format=jsonl >runs/$model.jsonl
done
.finetune/bin/python - <<'PYTHON'
import json

files = [open(f"runs/{model}.jsonl") for model in ("smollm2", "short")]
for before, after in zip(*(map(json.loads, file) for file in files)):
    question = before["prompt"].split("user\n")[1].split("<|im_end|>")[0]
    print(f"\n{question}\n  before: {before['text']}\n  after:  {after['text']}")
PYTHON
