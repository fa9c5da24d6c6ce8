#!/usr/bin/env bash
# Check a machine with a GPU in 9 minutes: build the kernels, run their tests, measure the link and passes of a 70B shape.
#
#   OUT=logs LIMIT_S=420 bench/gpu/first.sh [folder of wheels]
#
# A failed step does not stop the next. The most valuable steps run first. See steps.sh for the files in $OUT.
set -u
limit_s=${LIMIT_S:-535}
# shellcheck source=bench/gpu/steps.sh
source "$(dirname "$0")/steps.sh"

prepare correctness expansion ceilings streamed products attention pinning generation
step correctness 95 bash -c 'section correctness'
step expansion 45 bash -c expansion
step ceilings 30 bash -c 'section ceilings'
step streamed 100 bash -c 'section streamed'
step products 35 bash -c 'section products'
step attention 35 bash -c 'section attention'
step pinning 40 bash -c 'section pinning'
step generation 240 bash -c 'section generation' # in the time that the others left
finish
