"""Fresh processes with another environment."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(*arguments, **environment) -> str:
    """Output of a fresh Python, on the CPU, that turns every warning into an error; fails with its errors."""
    variables = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    variables |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run([sys.executable, "-W", "error", *arguments], cwd=ROOT, env=variables, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
