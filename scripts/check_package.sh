#!/usr/bin/env bash
# Build the source archive and a wheel without libraries from it, then the binary wheel. Install the binary wheel into a new
# environment, run a GGUF model outside the repository, without a compiler, and uninstall it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=
OFFLOAD_RT_BUILD=none "$python" -m build --outdir "$work/archive" "$root" > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
make -C "$root" wheel DIST="$work/dist" > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" - <<END
from pathlib import Path
from zipfile import ZipFile

expected = {path.name: path.read_bytes() for path in Path("$root/csrc").iterdir()}
for folder, n_libraries in (("archive", 0), ("dist", 4)):
    (path,) = Path("$work", folder).glob("*.whl")
    wheel = ZipFile(path)
    sources = [name for name in wheel.namelist() if name.startswith("offload_rt/csrc/") and name[-1] != "/"]
    assert {Path(name).name: wheel.read(name) for name in sources} == expected
    libraries = [name for name in wheel.namelist() if name.endswith(".so")]
    assert len(libraries) == n_libraries, libraries
    assert path.stat().st_size < 5e6
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {n_libraries} libraries")
END
PYTHONPATH=$root/scripts "$python" - <<END
import json
from pathlib import Path

import write_gguf
from safetensors.torch import load_file

source = Path("$root/models/demo-target")
tensors = load_file(source / "model.safetensors")
metadata, stored, _ = write_gguf.model(json.loads((source / "config.json").read_text()), tensors, "Q4_0")
metadata |= write_gguf.tokenizer(source / "tokenizer.json")
Path("$work/model.gguf").write_bytes(write_gguf.file_bytes(metadata, stored))
END
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "$work"/dist/*.whl
# The dependencies of the repository's environment, behind the installed package.
"$python" -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
    > "$(echo "$work"/venv/lib/python3*/site-packages)/dependencies.pth"
cd "$work"
alone() { env -i HOME="$work/home" PATH="$work/venv/bin" "$@"; }
alone python -c "import offload_rt; assert offload_rt.__file__.startswith('$work'), offload_rt.__file__"
alone offload-rt doctor | tee doctor.txt
grep -q "^CPU kernels *prebuilt, using" doctor.txt
alone offload-rt run "$work/model.gguf" "import os" --max-new-tokens 8 --temperature 1 2> run.txt || { cat run.txt; exit 1; }
if grep building run.txt || [ -e "$work/home/.cache/offload_rt/kernels" ]; then exit 1; fi
HOME="$work/home" "$root/scripts/check_removal.sh" "$work/venv"
