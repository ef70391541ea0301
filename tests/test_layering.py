"""The import arrows point down, importing starts no device, and the checker that says so can fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import layers

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ("flax", "matplotlib", "rich", "tokenizers", "gguf", "safetensors", "optax", "jaxtyping")


def _python(code: str) -> str:
    """Runs code in a fresh interpreter in which any warning is an error, and returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT, env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def _core_modules() -> list[str]:
    """Modules that need nothing but jax and numpy."""
    core = ("gumbeljax*", "pallas_kernels*", "gumbeljax._typing")
    extras = [pattern for pattern in layers.OUTSIDE if pattern not in core]
    return [m for m in layers.read_sources(ROOT) if not layers.first_match(m, dict.fromkeys(extras))]


def test_arrows_point_down():
    sources = layers.read_sources(ROOT)
    assert {"gumbeljax", "gumbeljax.sampling", "pallas_kernels.noise"} <= set(sources)
    assert layers.violations(sources) == []


def test_nothing_reaches_into_private_jax():
    scripts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for folder in ("tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert "tests/conftest.py" in scripts
    assert [line for name, source in scripts.items() for line in layers.private_jax(name, source)] == []


SMALL_TREE = {
    "pallas_kernels": "",
    "pallas_kernels.noise": "import functools\nimport jax.numpy as jnp\n",
    "pallas_kernels.xla": "from pallas_kernels import noise\n",
    "gumbeljax": "from gumbeljax.sampling import sample\n",
    "gumbeljax._checks": "import numpy as np\n",
    "gumbeljax.groups": "from gumbeljax import _checks\nfrom pallas_kernels.noise import gumbel\n",
    "gumbeljax.sampling": "from . import _checks, groups\n",
    "gumbeljax.sharding": "from gumbeljax import sampling\n",
    "gumbeljax.models": "from .llama import Llama\n",
    "gumbeljax.models.llama": "from flax import nnx\nfrom ..sampling import sample\n",
}


def test_a_tree_in_order_passes():
    assert layers.violations(SMALL_TREE) == []


@pytest.mark.parametrize(
    ("name", "line", "complaint"),
    [
        ("gumbeljax._checks", "from gumbeljax import sampling", "gumbeljax.sampling (layer 3): arrows point down"),
        ("gumbeljax._checks", "from gumbeljax.sampling import sample", "arrows point down"),
        ("gumbeljax._checks", "from . import sampling", "arrows point down"),
        ("gumbeljax._checks", "def late():\n    import gumbeljax.sampling", "arrows point down"),
        ("gumbeljax._checks", "importlib.import_module('gumbeljax.sampling')", "arrows point down"),
        ("gumbeljax.groups", "from gumbeljax import sample", "imports gumbeljax (layer 6): arrows point down"),
        ("gumbeljax.models.llama", "from .. import sample", "imports gumbeljax (layer 6): arrows point down"),
        ("gumbeljax.models.llama", "import gumbeljax.nothing", "gumbeljax.nothing, which is not a module"),
        ("pallas_kernels.noise", "from gumbeljax import _checks", "arrows point down"),
        ("pallas_kernels.noise", "import numpy", "imports numpy; it may import jax"),
        ("pallas_kernels.noise", "from pallas_kernels import xla", "form a cycle"),
        ("gumbeljax.sampling", "from gumbeljax import sharding", "form a cycle"),
        ("gumbeljax.sampling", "from flax import nnx", "imports flax"),
        ("gumbeljax.sampling", "import matplotlib.pyplot as plt", "imports matplotlib"),
        ("gumbeljax.sampling", "from jax._src import core", "reaches into jax._src"),
        ("gumbeljax.sampling", "from jax import _src", "reaches into jax._src"),
        ("gumbeljax.sampling", "import jax\ncore = jax._src.core", "reaches into jax._src"),
        ("gumbeljax.forgotten", "import jax", "gumbeljax.forgotten has no layer"),
        ("gumbeljax.smc.forgotten", "import jax", "gumbeljax.smc.forgotten has no layer"),
    ],
)
def test_mutations_are_rejected(name: str, line: str, complaint: str):
    found = layers.violations(SMALL_TREE | {name: SMALL_TREE.get(name, "") + line + "\n"})
    assert any(complaint in sentence for sentence in found), found


def test_import_starts_no_device_and_warns_of_nothing():
    # jax refuses to change the number of devices once a backend has started.
    printed = _python(
        "import gumbeljax, jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "jax.config.update('jax_enable_x64', True)\n"
        "print(jax.device_count(), jax.numpy.ones(2).dtype)\n"
    )
    assert printed.split() == ["3", "float64"]


def test_a_started_device_would_be_noticed():
    with pytest.raises(AssertionError, match="jax_num_cpu_devices"):
        _python("import jax\njax.numpy.ones(2)\njax.config.update('jax_num_cpu_devices', 3)\n")


def test_core_imports_no_extra():
    core = _core_modules()
    assert "gumbeljax" in core and "gumbeljax.nnx" not in core
    printed = _python(f"import sys\nimport {', '.join(core)}\nprint(*[m for m in {OPTIONAL!r} if m in sys.modules])\n")
    assert printed.split() == []


@pytest.mark.parametrize("name,extra", [("nnx", "flax"), ("models", "models")])
def test_a_missing_extra_is_named(name, extra):
    printed = _python(
        f"import sys\nsys.modules['flax'] = None\ntry:\n    import gumbeljax.{name}\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert printed == f"gumbeljax.{name} must have the package flax, got none; run pip install 'gumbeljax[{extra}]'.\n"


def test_every_core_module_imports_without_starting_a_device():
    _python(f"import jax\nimport {', '.join(_core_modules())}\njax.config.update('jax_num_cpu_devices', 3)\n")
