# make reproduce   install, run every experiment that is not up to date, redraw, build the reports
# make test | lab | report | lint | clean          PYTHON=python3.12 and PROFILE=smoke override the defaults
PYTHON ?= python3
PROFILE ?= auto
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP := $(VENV)/.installed

.PHONY: venv install reproduce test lab report lint clean

venv install: $(STAMP)

# The stamp file skips the installation unless pyproject.toml or constraints.txt has changed. ipykernel
# puts the kernel `python3` into the venv itself, so notebooks run in the venv's Python.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[kit,dev]"
	@touch $@

reproduce: install
	$(BIN)/python -m t1lib run all --profile $(PROFILE)
	$(BIN)/python -m t1lib report --profile $(PROFILE)

# Builds the PDFs if TeX is installed, and otherwise says what is missing.
report: install
	$(BIN)/python -m t1lib report --profile $(PROFILE)

test: install
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

lab: install
	$(BIN)/python -m jupyterlab --allow-root --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/start.ipynb

lint: install
	$(BIN)/python -m ruff check .

# Keeps .venv and the finished runs.
clean:
	rm -rf build dist .pytest_cache .ruff_cache outputs/*/.*.partial outputs/*/.*.old
	find t1lib tests -name __pycache__ -type d -prune -exec rm -rf {} +
