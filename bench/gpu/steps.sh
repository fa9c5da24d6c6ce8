# Steps of a run on a machine with a GPU; sourced by first.sh and second.sh, which set `limit_s`.
#
# Environment: OUT, folder of the results (default: build/gpu); PYTHON, the interpreter with torch (default: python3);
# WHEELS, a folder of wheels for packages that are missing or too old. Nothing is downloaded.

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
OUT=${OUT:-$PWD/build/gpu}
PYTHON=${PYTHON:-python3}
WHEELS=${1:-${WHEELS:-}}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT" "$work/logs"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH="$work/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OFFLOAD_RT_COMMIT="${OFFLOAD_RT_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"
started=$SECONDS
failed=0
summary="$OUT/$(basename "$0" .sh).txt"
printf '%-12s %8s  %s\n' step seconds result > "$summary"

note() { # name, seconds, result
  printf '%-12s %8s  %s\n' "$1" "$2" "$3" >> "$summary"
}

# Run a step: name, its limit in seconds, command. The step gets less time where the run's limit is near.
step() {
  local name=$1 most=$2 left begun code reason
  shift 2
  left=$((limit_s - (SECONDS - started)))
  if ((left < 10)); then
    note "$name" - "left out: $left s are left"
    failed=1
    return 1
  fi
  ((most = most < left ? most : left))
  begun=$SECONDS
  echo "== $name (at most $most s)"
  STEP_S=$most timeout --kill-after=5 "$most" "$@" > "$work/logs/$name.log" 2>&1
  code=$?
  tar -czf "$OUT/logs.tar.gz" -C "$work" logs # after each step: the next may be the last
  reason=$(grep -v '^[[:space:]]*$' "$work/logs/$name.log" | tail -n 1 | cut -c 1-150)
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
  nproc
  free -g | head -n 2
  df -h /dev/shm | tail -n 1
  "$PYTHON" bench/gpu/requirements.py "$work/site" ${WHEELS:+"$WHEELS"}
}

# Pytest on the tests that need a card. Fails if none passed: without kernels all are skipped.
tests() { # files
  "$PYTHON" -m pytest -o addopts= -rfEs --tb=short -p no:cacheprovider "$@" -m cuda | tee "$work/pytest.txt"
  ((PIPESTATUS[0] == 0)) && tail -n 1 "$work/pytest.txt" | grep -q ' passed'
}

# A section of bench.gpu in the step's time. Each result is written to $OUT and printed at once.
section() { # name
  local minutes
  minutes=$(printf '%d.%02d' $(((STEP_S - 10) / 60)) $(((STEP_S - 10) % 60 * 100 / 60)))
  "$PYTHON" -m bench.gpu --again --section "$1" --minutes "$minutes" --results "$OUT" --logs "$work/logs"
}

finish() {
  echo
  cat "$summary"
  exit $failed
}

export -f environment tests section
export OUT PYTHON WHEELS work
