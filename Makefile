# Every target sets up what it needs: `make demo` and `make test` work on a fresh machine.
# --no-compile: Python compiles what is imported, a third of the files that pip would.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

LOWEST := .venv-lowest
UV := .venv-uv/bin/uv

.PHONY: setup help demo test slow kernels gpu lowest pins lint pages types wheel docs clean
setup: $(INSTALLED) ## set up .venv (the default)
	@$(MAKE) -s help

help: ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 12

$(INSTALLED): pyproject.toml constraints.txt .ci/system-packages
	@bash .ci/system-packages
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(PIP) install --no-compile -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(INSTALLED) ## compare four objectives on the digits, with a table and a picture at the end
	$(BIN)/dipole demo vision

test: $(INSTALLED) ## the test suite (two processes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

slow: $(INSTALLED) ## the tests that take minutes (two processes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n 2 --dist loadfile

kernels: $(INSTALLED) ## the kernels compiled for three GPUs, without a GPU
	$(BIN)/python -m pytest -m kernels

gpu: $(INSTALLED) ## the tests that need an accelerator
	$(BIN)/python -m pytest -m gpu

lowest: $(UV) ## the tests with the lowest versions that pyproject.toml allows, in an environment of their own
	@test -x $(LOWEST)/bin/python || $(UV) venv -q --seed --python $(PYTHON) $(LOWEST)
	@echo "installing into $(LOWEST) (some minutes the first time)"
	@VIRTUAL_ENV=$(LOWEST) $(UV) pip install -q --resolution lowest-direct -e ".[dev]"
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

pins: $(UV) ## whether constraints.txt can be installed on every system and Python, with all extras
	@.ci/pins $(UV)

$(UV):
	@bash .ci/system-packages
	@$(PYTHON) -m venv .venv-uv && .venv-uv/bin/python -m pip --disable-pip-version-check -q install uv

lint: $(INSTALLED) ## ruff, import layers, and whether the rendered pages are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/generate/render.py --check

pages: $(INSTALLED) ## write the pages of docs/templates
	$(BIN)/python docs/generate/render.py

types: $(INSTALLED) ## mypy
	MYPY_NUM_WORKERS=2 $(BIN)/mypy -p dipole

wheel: $(INSTALLED) ## build the wheel, install it into an empty environment and import it
	@rm -rf dist build/wheel && $(BIN)/python -m build --wheel --no-isolation -o dist . > /dev/null
	@$(PYTHON) -m venv build/wheel
	@build/wheel/bin/python -m pip --disable-pip-version-check -q install --no-compile -c constraints.txt dist/*.whl
	cd build/wheel && bin/dipole show infonce > /dev/null && bin/python -c "import dipole, torch; \
	print('wheel: dipole', dipole.__version__, float(dipole.objective('infonce+dp')(torch.eye(4), torch.eye(4)).loss))"

docs: $(INSTALLED) ## build the site into build/site: tutorials run on small settings, a broken link or an undocumented name fails
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean: ## remove what was built, keep runs
	rm -rf build dist $(VENV) $(LOWEST)* .venv-uv *.egg-info
