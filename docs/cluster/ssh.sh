#!/bin/bash
# Trains on hosts that ssh reaches, one process each: bash docs/cluster/ssh.sh a b c
#
# The hosts share a file system that holds the environment and this folder. This is the
# plainest form; `python -m jshard.launch --hosts=a,b,c -- ...` does the same, forwards
# signals, and restarts after failures.
set -euo pipefail
ssh=${RSH:-ssh -tt}
python=${PYTHON:-.venv/bin/python}
port=${PORT:-8476}
hosts=("$@")
secret=$(mktemp "$PWD/.secret-XXXXXX") # of mode 600
trap 'rm -f "$secret"' EXIT
openssl rand -hex 32 > "$secret"

for index in "${!hosts[@]}"; do
  $ssh "${hosts[index]}" "cd '$PWD' && exec env JSHARD_SECRET_FILE='$secret' \
    '$python' -m jshard.train --coordinator=${hosts[0]}:$port --num_processes=${#hosts[@]} --process_id=$index \
    ${ARGS:---config=gpt2_124m.py --workdir=runs/gpt}" &
done

code=0
for job in $(jobs -p); do
  wait "$job" || code=$?
done
exit "$code"
