#!/usr/bin/env bash
# Run the README on fresh Debian machines: in a chroot with a minimal root, as root and as a user.
#
#   scripts/fresh_machine.sh [SUITE ...]     as root, with mmdebstrap; default: bookworm (Python 3.11) and trixie (Python 3.13)
#
# Steps for each suite: the binary wheel (WHEEL, default that of this machine in dist) without compilers, its removal, the README's
# runnable commands, the steps of the Dockerfile. SIZE, BUDGET and TOKENS shorten `make run`, PYTEST_ADDOPTS shortens `make test`,
# USERS ("root user") selects users. The settings PIP_* reach pip; BIND names folders of packages that appear at the same path.
# A user has one environment, and all users share pip's cache: torch with CUDA, of the default index, has several GB.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
wheel=${WHEEL:-$(echo "$here"/dist/*"$(uname -m)".whl)}
work=$(mktemp -d)
root=$work/root
clone=$root/tmp/clone
finish() {
    for folder in ${BIND:-} /proc /sys /dev; do mountpoint -q "$root$folder" && umount -l "$root$folder"; done
    # A folder that is still mounted belongs to this machine.
    grep -q " $root/" /proc/mounts || rm -rf --one-file-system "$work"
}
trap finish EXIT
command -v mmdebstrap > /dev/null || { echo "mmdebstrap not found: apt install mmdebstrap"; exit 1; }

new_root() { # SUITE
    local folder
    mmdebstrap --quiet --variant=minbase --include=ca-certificates "$1" "$root"
    for folder in /proc /sys /dev ${BIND:-}; do
        mkdir -p "$root$folder"
        # Without a slave, `finish` would unmount /dev/pts of this machine, too.
        mount --rbind --make-rslave "$folder" "$root$folder"
    done
    cp /etc/resolv.conf "$root/etc/"
    echo "127.0.0.1 localhost $(uname -n)" > "$root/etc/hosts" # as the installer does, for torchrun
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    chroot "$root" useradd -m user
    mkdir "$root/pip" "$clone"
    git -C "$here" archive HEAD | tar -x -C "$clone"
    cp "$wheel" "$root/tmp/"
}

as() { # USER STAGE COMMAND: bash in the home of the user, who owns pip's cache for this time
    local home settings start=$SECONDS
    echo "=== $suite, $1: $2"
    chroot "$root" chown -R "$1:$1" /pip
    home=$(chroot "$root" bash -c "echo ~$1")
    mapfile -t settings < <(env | grep -E '^(PIP_|SIZE=|BUDGET=|TOKENS=|PYTEST_ADDOPTS=)')
    chroot --userspec="$1:$1" "$root" env -i HOME="$home" PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive \
        PIP_CACHE_DIR=/pip "${settings[@]}" bash -euc "cd; $3"
    echo "=== passed in $((SECONDS - start)) s"
}

# The packages of the README's first `apt install`.
packages() { sed -n 's/^sudo apt install \([^#]*\).*/\1/p' "$clone/README.md" | head -n 1; }

blocks() { awk '/^```sh runnable/ { on = 1; next } /^```/ { on = 0 } on' "$clone/README.md"; }

for suite in "${@:-bookworm trixie}"; do for suite in $suite; do
    new_root "$suite"
    as root python3-venv "apt-get update -qq && apt-get install -qq --no-install-recommends python3-venv > apt.log"
    for user in ${USERS:-root user}; do
        as "$user" "binary wheel" "if command -v g++; then exit 1; fi; cp -r /tmp/clone offload_rt; python3 -m venv env; . env/bin/activate
            $(blocks | grep -m1 '^export')
            pip install -q /tmp/*.whl; cd offload_rt; python scripts/fetch_model.py --out demo-cache
            offload-rt doctor | tee doctor.txt; grep -q '^CPU kernels *prebuilt' doctor.txt
            $(blocks | grep -m1 '^offload-rt run'); bash scripts/check_removal.sh ../env"
    done
    as root "packages of the README" "apt-get install -qq --no-install-recommends $(packages) > apt.log"
    blocks > "$root/tmp/commands.sh"
    for user in ${USERS:-root user}; do
        as "$user" "commands of the README" ". env/bin/activate; cd offload_rt; bash -eux /tmp/commands.sh; rm -r ../offload_rt"
    done
    cp -r "$clone" "$root/src"
    sed -n 's/^RUN //p' "$clone/Dockerfile" > "$root/tmp/steps.sh"
    as root "steps of the Dockerfile" "python3 -m venv env; . env/bin/activate; pip uninstall -qy offload-rt
        bash -eux /tmp/steps.sh; offload-rt doctor"
    finish
done; done
echo "=== passed"
