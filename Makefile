# `make run` and `make test` do all their own set-up.
PYTHON ?= python3
PY := .venv/bin/python

# The demonstration: SmolLM2-135M-Instruct, expanded to about three times its memory budget.
SIZE ?= 1600MB
BUDGET ?= 600MB
TOKENS ?= 128
PROMPT ?= How do plants make food from sunlight?
# The model as a GGUF file, the same weights in bfloat16, and the expansion, whose wider MLPs compute the same.
GGUF := demo-cache/SmolLM2-135M-Instruct.Q4_1.gguf
DENSE := demo-cache/SmolLM2-135M-Instruct
EXPANDED := demo-cache/SmolLM2-135M-Instruct-$(SIZE)
# A draft model or head; without it the text itself proposes the trees.
DRAFT ?= $(wildcard models/smollm2-eagle3)
DRAFTING = $(if $(DRAFT),--draft-model $(DRAFT))

.PHONY: venv kernels run run-small chat serve docs test test-fast test-isa test-oldest lint bench compare wheel release clean

venv: .venv/installed .venv/kernels

.venv/installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else 'needs Python 3.11 to 3.13, has ' + sys.version.split()[0] + '; set PYTHON')"
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

# Systems for `make compare` only. DeepSpeed's NVMe offload also needs libaio-dev, llama.cpp needs node and npm.
.venv/compared: .venv/installed
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev,compare]"
	npm install --silent --prefix build/node node-llama-cpp@3.22.1
	-TORCH_EXTENSIONS_DIR=build/torch-extensions PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m bench.compare.peers.deepspeed
	touch $@

# After the install, whose isolated build has no torch; without nvcc this says so and plain torch serves.
.venv/kernels: .venv/installed offload_rt/ops/build.py $(wildcard csrc/*)
	$(PY) scripts/build_kernels.py
	touch $@

kernels: .venv/installed
	$(PY) scripts/build_kernels.py

$(GGUF): | .venv/installed
	$(PY) scripts/fetch_model.py --out $(@D)

$(DENSE)/model.safetensors: $(GGUF)
	$(PY) -m offload_rt.convert $(GGUF) --dequantize $(DENSE)

run: venv $(DENSE)/model.safetensors
	$(PY) scripts/expand.py --source $(DENSE) --out $(EXPANDED) --size $(SIZE) --keep-width
	$(PY) -m offload_rt.run --model $(EXPANDED) --device-memory $(BUDGET) $(DRAFTING) --plan
	$(PY) -m offload_rt.run --model $(EXPANDED) --device-memory $(BUDGET) $(DRAFTING) --max-new-tokens $(TOKENS) \
		--prompt '$(PROMPT)' --chat --show-tree --baseline

# The demo pair of this repository needs no download. It continues code.
SMALL := demo-cache/expanded-400MB

run-small: venv
	$(PY) scripts/expand.py --source models/demo-target --out $(SMALL) --size 400MB
	$(PY) -m offload_rt.run --model $(SMALL) --draft-model models/demo-draft --device-memory 100MB --max-new-tokens $(TOKENS) \
		--prompt 'def read_lines(path, encoding="utf-8"):' --show-tree --baseline

chat: venv $(GGUF)
	$(PY) -m offload_rt.chat --model $(GGUF) $(DRAFTING)

serve: venv $(GGUF)
	$(PY) -m offload_rt.serve --model $(GGUF) $(DRAFTING)

# Without cached bytecode, the programs of tests compile the package at each start.
unexport PYTHONDONTWRITEBYTECODE

# worksteal divides the tests into contiguous halves, so that most checkpoints are written once.
PYTEST = $(PY) -m pytest -n 2 --dist worksteal

# Without the repetitions of `test-isa`.
test: venv
	$(PYTEST) --ignore tests/ops/test_neon.py

# Without tests of more than two CPU seconds.
test-fast: venv
	$(PYTEST) -m "not slow"

# Marker "numeric" names the tests whose results depend on the CPU's instructions. Repeat them with AVX2 but without
# AVX-512, and those of single kernels and passes without AVX2, too. MKL obeys its setting on Intel CPUs only.
# ONEDNN_MAX_CPU_ISA=AVX2 disables oneDNN's bfloat16 products. The kernels for aarch64 run under qemu, where it is installed.
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
BASELINE := ATEN_CPU_CAPABILITY=default

test-isa: venv
	$(AVX2) $(PYTEST) -m "numeric and not slow"
	$(BASELINE) $(PYTEST) -m "numeric and not slow" tests/executor tests/kv tests/models tests/ops
	$(PY) -m pytest tests/ops/test_neon.py

# The oldest admitted version of every dependency but torch, in a separate environment.
OLDEST := .venv-oldest

$(OLDEST)/installed: pyproject.toml scripts/oldest.py | venv
	$(PYTHON) -m venv $(OLDEST)
	$(PY) scripts/oldest.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c $(OLDEST)/constraints.txt
	touch $@

# Without the comparison with transformers' dequantised MXFP4 model, whose logits differed in transformers 5.21.
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" tests/models tests/text tests/weights \
		tests/parallel/test_rank_families.py --ignore tests/weights/test_mxfp4.py

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy offload_rt tests/typing

# The documentation as a site in site/.
docs: venv
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	$(PY) scripts/settings_page.py
	$(PY) -m mkdocs build --strict --quiet

compare: .venv/compared $(DENSE)/model.safetensors
	$(PY) -m scripts.compare --chart docs/compare.png
	$(PY) -m bench.compare.gguf_types
	$(PY) -m bench.compare.estimates

# Binary wheel; OFFLOAD_RT_BUILD=all adds the CUDA kernels, MACHINE=aarch64 uses Debian's cross-compiler. auditwheel checks that
# glibc 2.28 suffices; of another machine, whose tags it does not accept, it names the oldest glibc.
DIST ?= dist
MACHINE ?= $(shell uname -m)
CROSS = $(if $(filter-out $(shell uname -m),$(MACHINE)),CXX=$(MACHINE)-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-$(MACHINE))
wheel: .venv/installed
	rm -rf build/wheel
	$(CROSS) $(PY) -m build --wheel --no-isolation --outdir build/wheel .
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m auditwheel repair --only-plat --plat $(if $(CROSS),auto,manylinux_2_28_$(MACHINE)) \
		--exclude 'libtorch*.so' --wheel-dir $(DIST) build/wheel/*.whl

# Version, date and section of the changelog, commit and tag; a pushed tag starts .github/workflows/release.yml.
release: .venv/installed
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[release]"
	.venv/bin/bump-my-version bump --new-version $(VERSION)

bench: venv
	$(PY) -m bench.stream
	$(PY) -m bench.speculate.verify
	$(PY) -m bench.speculate
	$(PY) -m bench.stream.trace
	$(PY) -m bench.compute
	$(PY) -m bench.speculate.predictions

clean:
	rm -rf .venv $(OLDEST) demo-cache build *.egg-info offload_rt/ops/_*.so offload_rt/ops/_*.log offload_rt/ops/_*.failed
