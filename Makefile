PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Or .ci/oldest.txt or .ci/newest.txt, with a VENV of their own.
CONSTRAINTS := constraints.txt

.PHONY: demo test lint docs benchmark clean

# One stamp a set of packages; all follow pyproject.toml and the pinned versions.
$(VENV)/.demo: pyproject.toml setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e ".[plot]" tqdm
	touch $@

$(VENV)/.dev: pyproject.toml setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e ".[dev]"
	touch $@ $(VENV)/.demo

$(VENV)/.docs: pyproject.toml setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e ".[docs]"
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/latent_sde.py

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	@# Pages with warnings must not count as done at the next run; their code is cached elsewhere.
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs || \
		{ rm -rf build/docs/.doctrees; exit 1; }
	@echo "open build/docs/index.html"

benchmark: $(VENV)/.demo
	$(BIN)/python benchmarks/elbo_step.py

clean:
	rm -rf $(VENV) build docs/api *.egg-info .pytest_cache .ruff_cache .mypy_cache
