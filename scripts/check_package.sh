#!/usr/bin/env bash
# Build the source distribution and from it the wheel, install the wheel into an empty folder, and
# generate text with it outside the repository.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --outdir "$work/dist" "$root" > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$work/site" "$work"/dist/*.whl
# PYTHONPATH precedes the editable install of the repository.
cd "$work"
export PYTHONPATH=$work/site
"$python" - <<EOF
from pathlib import Path

import offload_rt

package = Path(offload_rt.__file__).parent
assert package.is_relative_to("$work"), package
expected = {path.name: path.read_bytes() for path in Path("$root/csrc").iterdir()}
assert {path.name: path.read_bytes() for path in (package / "csrc").iterdir()} == expected
assert not list(package.rglob("*.so"))
EOF
"$python" -m offload_rt.run --model "$root/models/demo-target" --device-memory 64MiB \
    --prompt "import os" --max-new-tokens 8
