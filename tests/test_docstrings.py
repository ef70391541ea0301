"""The examples in docstrings and in the README run and say the truth; every public function has one."""

import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gumbeljax
from tests import layers

ROOT = Path(__file__).resolve().parent.parent
MODULES = [name for name in layers.read_sources(ROOT) if not name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=flags).failed == 0


@pytest.mark.parametrize("name", gumbeljax.__all__)
def test_public_functions_are_documented(name: str):
    thing = getattr(gumbeljax, name)
    if inspect.isroutine(thing) or inspect.isclass(thing):
        assert thing.__doc__, f"gumbeljax.{name} has no docstring"
    if inspect.isfunction(thing):
        assert ">>>" in thing.__doc__, f"the docstring of gumbeljax.{name} has no example"


def test_readme_example():
    """The README's first Python block, on its own, on a CPU, with warnings as errors."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block, "the README shows no Python"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block[1]],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
