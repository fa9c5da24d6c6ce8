#!/usr/bin/env bash
# Measure generation, models on the card, formats, peers, further trees, mixtures and ranks, after first.sh.
#
#   OUT=logs LIMIT_S=535 bench/gpu/second.sh [folder of wheels, or ''] [step ...]
#
# Runs the named steps, or all of them, while there is time. See steps.sh for the files in $OUT.
set -u
limit_s=${LIMIT_S:-3600}
# shellcheck source=bench/gpu/steps.sh
source "$(dirname "$0")/steps.sh"
shift $(($# > 0 ? 1 : 0))
names=${*:-generation onchip formats peers memcheck rows paced experts flex ranks}

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

# shellcheck disable=SC2086
prepare expansion $names
step expansion 90 bash -c expansion
for name in $names; do
  if [[ $name != ranks ]]; then
    step "$name" 540 bash -c "section $name"
  elif ((n_cards > 1)); then
    step ranks 240 bash -c ranks
  else
    skip ranks "there is one GPU"
  fi
done
finish
