# `make run` and `make test` do all their own set-up.
PYTHON ?= python3
PY := .venv/bin/python

# The demonstration: a checkpoint four times larger than its memory budget, and a draft model for its trees.
SIZE ?= 1600MB
BUDGET ?= 400MB
TOKENS ?= 128
EXPANDED := demo-cache/expanded-$(SIZE)
ENGINE = --model $(EXPANDED) --draft-model models/demo-draft --device-memory $(BUDGET)
PROMPT ?= def read_lines(path, encoding="utf-8"):

.PHONY: venv kernels run chat serve docs test test-fast test-isa test-oldest lint bench compare clean

venv: .venv/installed .venv/kernels

.venv/installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else 'needs Python 3.11 to 3.13, has ' + sys.version.split()[0] + '; set PYTHON')"
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

# Compile llama.cpp for this machine and without its vision library. Add -DGGML_NATIVE=OFF for AVX2 only.
LLAMA_CMAKE ?= -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_OPENSSL=OFF

# Systems for `make compare` only. llama.cpp compiles for half an hour on two cores.
.venv/compared: .venv/installed
	CMAKE_ARGS="$(LLAMA_CMAKE)" $(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev,compare]"
	touch $@

# After the install, whose isolated build has no torch; without nvcc this says so and plain torch serves.
.venv/kernels: .venv/installed offload_rt/ops/build.py $(wildcard csrc/*)
	$(PY) scripts/build_kernels.py
	touch $@

kernels: .venv/installed
	$(PY) scripts/build_kernels.py

run: venv
	$(PY) scripts/expand.py --source models/demo-target --out $(EXPANDED) --size $(SIZE)
	$(PY) -m offload_rt.run $(ENGINE) --plan
	$(PY) -m offload_rt.run $(ENGINE) --max-new-tokens $(TOKENS) --prompt '$(PROMPT)' --show-tree --baseline

# The demo pair continues code. Its chat template passes the messages through.
CHAT = --model models/demo-target --draft-model models/demo-draft --chat-template models/chat.jinja

chat: venv
	$(PY) -m offload_rt.chat $(CHAT) --max-tokens 200 --plain

serve: venv
	$(PY) -m offload_rt.serve $(CHAT)

# Without cached bytecode, the programs of tests compile the package at each start.
unexport PYTHONDONTWRITEBYTECODE

# worksteal divides the tests into contiguous halves, so that most checkpoints are written once.
PYTEST = $(PY) -m pytest -n 2 --dist worksteal

test: venv
	$(PYTEST)

# Without tests of more than two CPU seconds.
test-fast: venv
	$(PYTEST) -m "not slow"

# Marker "numeric" names the tests whose results depend on the CPU's instructions. Repeat them with AVX2 but without
# AVX-512, and those of single kernels and passes without AVX2, too. MKL obeys its setting on Intel CPUs only.
# ONEDNN_MAX_CPU_ISA=AVX2 disables oneDNN's bfloat16 products.
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
BASELINE := ATEN_CPU_CAPABILITY=default

test-isa: venv
	$(AVX2) $(PYTEST) -m "numeric and not slow"
	$(BASELINE) $(PYTEST) -m "numeric and not slow" tests/executor tests/kv tests/models tests/ops

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

compare: .venv/compared
	$(PY) -m scripts.compare --chart docs/compare.png
	$(PY) -m scripts.compare --quantize pack-quantized --rounds 2
	$(PY) -m scripts.compare --gguf BF16 --budget 6GB --prompt-tokens 192
	$(PY) -m scripts.compare --gguf Q4_0 --budget 6GB --prompt-tokens 192

bench: venv
	$(PY) -m bench.stream
	$(PY) -m bench.speculate.verify
	$(PY) -m bench.speculate
	$(PY) -m bench.stream.trace
	$(PY) -m bench.compute
	$(PY) -m bench.speculate.predictions

clean:
	rm -rf .venv $(OLDEST) demo-cache build *.egg-info offload_rt/ops/_*.so offload_rt/ops/_*.log
