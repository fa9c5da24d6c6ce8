# Steps of a run on a machine with a GPU; sourced by first.sh and second.sh, which set `limit_s`.
#
# Environment: OUT, folder of the results (default: build/gpu); PYTHON, the interpreter with torch (default: python3);
# WHEELS, a folder of wheels for packages that are missing or too old; OFFLOAD_RT_COMMIT, without a .git folder. Nothing
# is downloaded.
#
# $OUT receives three files, complete up to the present: NAME.txt, a table of all steps; NAME.log, their output with a
# line per measurement; NAME.tar.gz, the result files of sections and their stderr, for bench/results/gpu.

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
OUT=${OUT:-$PWD/build/gpu}
PYTHON=${PYTHON:-python3}
WHEELS=${1:-${WHEELS:-}}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT" "$work/results"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH="$work/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OFFLOAD_RT_COMMIT="${OFFLOAD_RT_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"
started=$SECONDS
failed=0
files="$OUT/$(basename "$0" .sh)"
: > "$files.log"
printf '%-12s %8s  %s\n' step seconds result | tee "$files.txt"

note() { # name, seconds, result
  printf '%-12s %8s  %s\n' "$1" "$2" "$3" | tee -a "$files.txt"
}

# Run a step: name, its limit in seconds, command. The step gets less time where the run's limit is near.
step() {
  local name=$1 most=$2 left begun code first reason
  shift 2
  left=$((limit_s - (SECONDS - started)))
  if ((left < 10)); then
    note "$name" - "left out: $left s are left"
    failed=1
    return 1
  fi
  ((most = most < left ? most : left))
  begun=$SECONDS
  printf '\n== %s (at most %s s)\n' "$name" "$most" >> "$files.log"
  first=$(($(wc -c < "$files.log") + 1))
  STEP_S=$most timeout --kill-after=5 "$most" "$@" >> "$files.log" 2>&1
  code=$?
  tar -czf "$files.tar.gz" -C "$work" results # after each step: the next may be the last
  reason=$(tail -c "+$first" "$files.log" | grep -v '^[[:space:]]*$' | tail -n 1 | cut -c 1-150)
  case $code in
    0) note "$name" $((SECONDS - begun)) "ok: $reason" ;;
    124 | 137) note "$name" $((SECONDS - begun)) "over after $most s: $reason" ;;
    *) note "$name" $((SECONDS - begun)) "failed with $code: $reason" ;;
  esac
  ((code)) && failed=1
  return "$code"
}

skip() { # name, reason
  note "$1" - "left out: $2"
}

environment() {
  nvidia-smi -L || echo "no nvidia-smi"
  nvidia-smi --query-gpu=driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader
  nvcc --version | tail -n 2
  lscpu | grep 'Model name'
  nproc
  free -g | head -n 2
  df -h /dev/shm | tail -n 1
  "$PYTHON" -c 'import sys, torch
n_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
print("torch", torch.__version__, "with", n_cards, "GPUs")
open(sys.argv[1], "w").write(str(n_cards))' "$work/n_cards"
  "$PYTHON" bench/gpu/requirements.py "$work/site" ${WHEELS:+"$WHEELS"}
}

# Build the libraries into the package: tests have an empty cache.
build() {
  "$PYTHON" scripts/build_kernels.py --this-machine && "$PYTHON" -c 'from offload_rt.ops import extension
reason = extension.missing()
print(reason or "built, and one was launched")
raise SystemExit(bool(reason))'
}

# Check packages and GPU, build, and expand the 70B shape meanwhile. Without a GPU leave out all steps.
prepare() { # names of the steps
  step environment 65 bash -c environment
  n_cards=$(cat "$work/n_cards" 2> /dev/null || echo 0)
  if ((n_cards == 0)); then
    failed=1
    for name in build "$@"; do
      skip "$name" "torch of $PYTHON can use no GPU"
    done
    finish
  fi
  "$PYTHON" -m bench.gpu.shapes > "$work/results/expand.log" 2>&1 &
  export EXPANDING=$!
  step build 90 bash -c build
  export OFFLOAD_RT_BUILD=0 # a failed build takes its time once
}

# Wait for the 70B shape: its expansion uses the link's memory.
expansion() {
  tail --pid "$EXPANDING" -n 1 -f "$work/results/expand.log"
}

# A section of bench.gpu in the step's time.
section() { # name
  local left
  left=$((STEP_S - SECONDS - 5))
  ((left = left < 1 ? 1 : left))
  "$PYTHON" -m bench.gpu --again --section "$1" --results "$work/results" \
    --minutes "$(printf '%d.%03d' $((left / 60)) $((left % 60 * 1000 / 60)))"
}

finish() {
  exit $failed
}

export -f environment build expansion section
export OUT PYTHON WHEELS work
