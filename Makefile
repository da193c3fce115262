# The README's two commands are `make demo` and `make test`. Each makes its own virtual environment
# under .venv and installs what it needs; nothing has to be installed by hand but git, Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check lint clean

demo: $(VENV)/.installed
	$(BIN)/python recipes/demo/run.py

# Lint, types, the import rule, all tests, and every lane that an interpreter is found for.
test: $(VENV)/.installed
	$(BIN)/nox --non-interactive

# The same without the lanes that need environments of their own.
check: $(VENV)/.installed
	$(BIN)/nox --non-interactive -s lint tests

lint: $(VENV)/.installed
	$(BIN)/nox --non-interactive -s lint

# The marker is younger than what it depends on, so a changed requirement installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hp_muon_plugin needs Python 3.11 or newer; try: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[megatron,plot,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .nox outputs build dist *.egg-info
