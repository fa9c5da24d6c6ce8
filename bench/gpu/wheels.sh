#!/usr/bin/env bash
# Download the wheels that a GPU machine without network lacks: bench/gpu/wheels.sh [folder]
#
# Such a machine has Python 3.12, torch 2.11, numpy, tokenizers, huggingface-hub and safetensors, but an older
# transformers. Pass the folder to first.sh and second.sh. Prints the bytes of the working tree and the wheels.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-build/wheels}
mkdir -p "$folder"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
  --dest "$folder" transformers==5.24.0 'prompt_toolkit>=3.0.48,<4' 'wcwidth<1'
du -cb "$folder"/*.whl
git ls-files -z --cached --others --exclude-standard | du -cb --files0-from=- | tail -n 1
