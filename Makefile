# Two commands for newcomers: `make demo` and `make test`. Each sets up .venv from nothing but Python and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The SGLang that the tests and the documentation are held against; the package itself takes any from 0.5.17.
SGLANG ?= 0.5.23
export OMP_NUM_THREADS ?= 2

.PHONY: demo test test-slow test-trainers unit integration faults fuzz compat lint format clean

demo: $(STAMP)
	$(BIN)/hs-capture demo

test: lint unit integration

unit: $(STAMP)
	$(BIN)/python -m pytest -q tests/unit -m "not slow"

integration: $(STAMP)
	$(BIN)/python -m pytest -q tests/integration -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q tests -m "slow and not gpu"

# The account of docs/reliability.md, but for the engine's part, which takes long: WHERE=engine
WHERE ?= store process run
faults: $(STAMP)
	$(BIN)/python -m tests.faults --where $(WHERE) --output faults.md

EXAMPLES ?= 3000
fuzz: $(STAMP)
	HS_CAPTURE_FUZZ=$(EXAMPLES) $(BIN)/python -m pytest -q tests/unit/fuzz tests/unit/data/test_conversations.py

# Downloads seven releases of SGLang, without what they depend on, and writes docs/compat.md.
compat: $(STAMP)
	$(BIN)/python -m tests.compat --wheels build/wheels

# Installs speculators and SpecForge into .trainers, or where HS_CAPTURE_TRAINERS says; see docs/trainers.md.
test-trainers: $(STAMP)
	$(BIN)/python -m tests.trainers.environments
	HS_CAPTURE_TRAINERS_REQUIRED=1 $(BIN)/python -m pytest -q tests/trainers

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): setup.py
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check sglang==$(SGLANG) -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo-output
