#!/usr/bin/env bash
# Compile the CUDA kernels for glibc 2.28 into build/, from where `OFFLOAD_RT_BUILD=all make wheel` copies them.
#
#   scripts/cuda_library.sh [CAPABILITY ...]     as root, with mmdebstrap and nvcc; default: all, e.g. 90 for a short check
#
# The system's glibc merges libpthread into libc, which binds a library to glibc 2.34. nvcc therefore runs in a root of Debian 11, which
# sees the toolkit, torch and csrc/. Symbols of its libstdc++ are newer than those of glibc 2.28, so the library contains them.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
root=$work/root
finish() {
    awk -v root="$root/" 'index($2, root) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r umount
    grep -q " $root/" /proc/mounts || rm -rf --one-file-system "$work"
}
trap finish EXIT
mapfile -t words < <("$here/.venv/bin/python" - <<END
import torch
from pathlib import Path
from offload_rt.ops import build

recipe = build.kernels(map(int, "$*".split()) if "$*" else build.architectures())
print(recipe.file, build.find_compiler("nvcc"), Path(torch.__file__).resolve().parent, sep="\\n")
print(*(argument.replace("{torch}", "/torch") for argument in recipe.arguments), sep="\\n")
END
)
toolkit=$("${words[1]}" --dryrun -c -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
mmdebstrap --quiet --variant=minbase --include=g++ bullseye "$root"
mkdir -p "$root/cuda" "$root/torch" "$root/csrc" "$here/build"
mount --bind "$toolkit" "$root/cuda"
mount --bind "${words[2]}" "$root/torch"
mount --bind "$here/csrc" "$root/csrc"
chroot "$root" env --chdir=/csrc PATH=/cuda/bin:/usr/bin:/bin nvcc -L/cuda/lib "${words[@]:3}" \
    -Xcompiler=-static-libstdc++ -Xlinker=--exclude-libs=libstdc++.a -o /tmp/library > "$here/build/${words[0]%.so}.log" 2>&1
mv "$root/tmp/library" "$here/build/${words[0]}"
ls -l "$here/build/${words[0]}"
