#!/usr/bin/env bash
# Check a machine with a GPU in 9 minutes: build the kernels, test them, measure the link and passes of a 70B shape.
#
#   OUT=logs LIMIT_S=420 bench/gpu/first.sh [folder of wheels]
#
# A failed step does not stop the next. The most valuable steps run first. $OUT receives first.txt, a table of all
# steps, a result file per measurement, and logs.tar.gz.
set -u
limit_s=${LIMIT_S:-535}
# shellcheck source=bench/gpu/steps.sh
source "$(dirname "$0")/steps.sh"

has_card() {
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
}

# Build the libraries into the package: tests have an empty cache. Expand the 70B shape meanwhile.
build() {
  "$PYTHON" -m bench.gpu.shapes > "$work/logs/expand.log" 2>&1 &
  "$PYTHON" scripts/build_kernels.py --this-machine && "$PYTHON" -c 'from offload_rt.ops import extension
reason = extension.missing()
print(reason or "built, and one was launched")
raise SystemExit(bool(reason))'
}

# Rows 1 and 768 only: 8 passes of about five seconds.
streamed() {
  while pgrep -f bench.gpu.shapes > /dev/null; do sleep 1; done
  section streamed
}
export -f build streamed

step environment 30 bash -c environment
if has_card 2> /dev/null; then
  step build 120 bash -c build
  step kernels 55 bash -c 'tests tests/ops/test_kernels.py tests/ops/test_few_rows.py'
  step ceilings 35 bash -c 'section ceilings'
  step streamed 125 bash -c streamed
  step products 40 bash -c 'section products'
  step streams 30 bash -c 'tests tests/offload/test_streamers.py'
  step card 60 bash -c 'tests -n 4 tests/engine/test_cuda.py'
  step attention 40 bash -c 'section attention'
else
  failed=1
  for name in build kernels ceilings streamed products streams card attention; do
    skip "$name" "torch of $PYTHON can use no GPU"
  done
fi
finish
