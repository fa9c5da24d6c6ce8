#!/usr/bin/env bash
# Check a machine with a GPU in 9 minutes: build the kernels, test them, measure the link and passes of a 70B shape.
#
#   OUT=logs LIMIT_S=420 bench/gpu/first.sh [folder of wheels]
#
# A failed step does not stop the next. The most valuable steps run first. See steps.sh for the files in $OUT.
set -u
limit_s=${LIMIT_S:-535}
# shellcheck source=bench/gpu/steps.sh
source "$(dirname "$0")/steps.sh"

prepare kernels ceilings streamed products streams card attention
step kernels 55 bash -c 'tests tests/ops/test_kernels.py tests/ops/test_few_rows.py'
step ceilings 35 bash -c 'section ceilings'
step streamed 120 bash -c 'section streamed'
step products 35 bash -c 'section products'
step streams 25 bash -c 'tests tests/offload/test_streamers.py'
step card 55 bash -c 'tests -n 4 tests/engine/test_cuda.py'
step attention 35 bash -c 'section attention'
finish
