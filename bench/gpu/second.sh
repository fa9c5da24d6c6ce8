#!/usr/bin/env bash
# Measure generation, models on the card, formats, peers, further trees, mixtures and ranks, after first.sh.
#
#   OUT=logs LIMIT_S=535 bench/gpu/second.sh [folder of wheels, or ''] [step ...]
#
# Runs the named steps, or all of them, while there is time. See steps.sh for the files in $OUT. The step "draft" is run
# by name only: it trains the committed draft head further, and a draft model, on text that the model in HEAD_TARGET, a GGUF
# file, writes on the GPU. $OUT then receives the head in parts of 15 MB, and the layers of the draft model. HEAD_MINUTES:
# time for writing, and for each training.
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

draft() {
  local write_minutes head_minutes model_minutes
  read -r write_minutes head_minutes model_minutes <<< "${HEAD_MINUTES:-1 1.5 1.5}"
  train() {
    "$PYTHON" scripts/train_drafts.py "$1" --target "$work/target" --work "$work/texts" --device "${HEAD_DEVICE:-cuda}" "${@:2}"
  }
  "$PYTHON" -m offload_rt.convert "$HEAD_TARGET" --dequantize "$work/target" &&
    train write --minutes "$write_minutes" --batch "${HEAD_BATCH:-1024}" &&
    train eagle3 --minutes "$head_minutes" --batch-tokens 32768 --rate 0.7 --start models/smollm2-eagle3/model.safetensors \
      --out "$work/head" &&
    split -b 15M "$work/head/model.safetensors" "$OUT/head.safetensors." &&
    train model --minutes "$model_minutes" --batch-tokens 32768 --out "$work/model" &&
    "$PYTHON" -c 'import sys
from safetensors.torch import load_file, save_file
weights = load_file(sys.argv[1])
save_file({name: weights[name] for name in weights if "embed" not in name}, sys.argv[2])' \
      "$work/model/model.safetensors" "$OUT/draft-layers.safetensors"
}
export -f draft

# shellcheck disable=SC2086
prepare expansion $names
[[ $names == draft ]] || step expansion 90 bash -c expansion
for name in $names; do
  if [[ $name == draft ]]; then
    step draft 400 bash -c draft
  elif [[ $name != ranks ]]; then
    step "$name" 540 bash -c "section $name"
  elif ((n_cards > 1)); then
    step ranks 240 bash -c ranks
  else
    skip ranks "there is one GPU"
  fi
done
finish
