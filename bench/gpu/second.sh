#!/usr/bin/env bash
# Measure generation, attention, models on the card, peers, mixtures, formats and ranks, after first.sh.
#
#   OUT=logs LIMIT_S=535 bench/gpu/second.sh [folder of wheels, or ''] [step ...]
#
# Runs the named steps, or all of them, while there is time. Each has a log in $OUT; second.txt is the table of all steps.
set -u
limit_s=${LIMIT_S:-3600}
# shellcheck source=bench/gpu/steps.sh
source "$(dirname "$0")/steps.sh"
shift $(($# > 0 ? 1 : 0))
names=${*:-generation attention onchip paced formats experts peers correctness ranks}

ranks() {
  set -o pipefail
  local arguments=(--model models/demo-target --draft-model models/demo-draft --device cuda --max-new-tokens 32
    --prompt 'def read_lines(path):' --json)
  "$PYTHON" -m offload_rt.run "${arguments[@]}" | tail -n 1 > "$work/alone.json" || return
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m offload_rt.run "${arguments[@]}" |
    tail -n 1 > "$work/both.json" || return
  "$PYTHON" -c 'import json, sys
texts = [json.load(open(path))["token_ids"] for path in sys.argv[1:]]
print("two ranks give the same tokens" if texts[0] == texts[1] else "two ranks give OTHER tokens", texts)
sys.exit(texts[0] != texts[1])' "$work/alone.json" "$work/both.json"
}
export -f ranks

step environment 60 bash -c environment
n_cards=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())' 2> /dev/null || echo 0)
for name in $names; do
  if ((n_cards == 0)); then
    failed=1
    skip "$name" "torch of $PYTHON can use no GPU"
  elif [[ $name != ranks ]]; then
    step "$name" 540 bash -c "section $name"
  elif ((n_cards > 1)); then
    step ranks 240 bash -c ranks
  else
    skip ranks "there is one GPU"
  fi
done
finish
