#!/usr/bin/env bash
# Uninstall the package from an environment and look for remaining files.
#
#   scripts/check_removal.sh ENVIRONMENT
set -euo pipefail
environment=$1
caches=$("$environment/bin/offload-rt" doctor --paths | sed -n '1d; s/^[a-z]* *\([^:]*\):.*/\1/p')
"$environment/bin/python" -m pip uninstall --quiet --yes offload-rt
if find "$environment" -iname 'offload[_-]rt*' | grep .; then exit 1; fi
if [ -d ~/.cache ] && find ~/.cache -type f ! -path '*/.cache/pip/*' | grep -vF "$caches"; then exit 1; fi
