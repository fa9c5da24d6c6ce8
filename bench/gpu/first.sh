#!/usr/bin/env bash
# Check a machine with a GPU in 9 minutes: build the kernels, run the tests that need a card, measure link and passes.
#
#   OUT=logs bench/gpu/first.sh [folder of wheels]
#
# Each step has a log in $OUT; a step that fails does not stop the next. first.txt is the table of all steps.
set -u
limit_s=${LIMIT_S:-535}
# shellcheck source=bench/gpu/steps.sh
source "$(dirname "$0")/steps.sh"

has_card() {
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
}

step environment 60 bash -c environment
if has_card 2> /dev/null; then
  step build 240 "$PYTHON" -c 'from offload_rt.ops import extension
reason = extension.missing()
print(reason or "built, and one was launched")
raise SystemExit(bool(reason))'
  step kernels 120 bash -c 'tests tests/ops/test_kernels.py tests/ops/test_few_rows.py'
  step streams 60 bash -c 'tests tests/offload/test_streamers.py'
  step card 120 bash -c 'tests tests/engine/test_cuda.py'
  step ceilings 60 bash -c 'section ceilings'
  step streamed 240 bash -c 'section streamed'
else
  failed=1
  for name in build kernels streams card ceilings streamed; do
    skip "$name" "torch of $PYTHON can use no GPU"
  done
fi
finish
