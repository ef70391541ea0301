"""The layers of the code base as a table, and the checker that reads imports from source and holds them to it.

A module may import from lower layers, and from its own layer as long as the arrows there form no cycle: so there is one
order in which every module comes after all that it imports.  Nothing here imports the code it judges.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGES = ("pallas_kernels", "gumbeljax")

# Exact names win over patterns; among patterns the first that matches.  A file that nothing here names is an error.
LAYERS: dict[str, int] = {
    "pallas_kernels": 0,
    "pallas_kernels.*": 0,
    "gumbeljax._typing": 1,
    "gumbeljax._checks": 1,
    "gumbeljax._implementation": 1,
    "gumbeljax._compat": 1,
    "gumbeljax._tuning": 1,
    "gumbeljax._keys": 1,
    "gumbeljax.processing": 1,
    "gumbeljax.quantized": 1,
    "gumbeljax._mesh": 1,
    "gumbeljax._call": 1,
    "gumbeljax._cut_filters": 2,
    "gumbeljax._cut_ranks": 2,
    "gumbeljax._shards": 2,
    "gumbeljax._partition": 2,
    "gumbeljax.groups": 2,
    "gumbeljax.relaxation": 2,
    "gumbeljax.kv_cache": 2,
    "gumbeljax.kv_cache.*": 2,
    "gumbeljax.bandit": 2,
    "gumbeljax.bandit.*": 2,
    "gumbeljax.reference": 2,
    "gumbeljax.smc.ess": 2,
    "gumbeljax.smc.resampling": 2,
    "gumbeljax.sampling": 3,
    "gumbeljax.autotuning": 4,
    "gumbeljax.categorical": 3,
    "gumbeljax.laws": 3,
    "gumbeljax.scoring": 3,
    "gumbeljax.sharding": 3,
    "gumbeljax.smc.core": 3,
    "gumbeljax.smc.weights": 3,
    "gumbeljax.speculative.acceptance": 3,
    "gumbeljax.speculative.coupled": 3,
    "gumbeljax.speculative.cut": 3,
    "gumbeljax.speculative.law": 3,
    "gumbeljax.speculative.leviathan": 3,
    "gumbeljax.speculative.partition": 3,
    "gumbeljax.speculative.stored": 3,
    "gumbeljax.speculative.verify": 3,
    "gumbeljax.speculative": 4,
    "gumbeljax.speculative.*": 4,
    "gumbeljax.smc": 4,
    "gumbeljax.smc.speculative": 4,
    "gumbeljax.decode": 5,
    "gumbeljax.decode.*": 5,
    "gumbeljax.nnx": 5,
    "gumbeljax.models": 5,
    "gumbeljax.models.*": 5,
    "gumbeljax": 6,
    "gumbeljax.cli": 7,
    "gumbeljax.cli.*": 7,
    "gumbeljax.__main__": 7,
}

# What a module may import from outside, beyond the standard library; the first pattern that matches.
OUTSIDE: dict[str, frozenset[str]] = {
    "pallas_kernels*": frozenset({"jax"}),
    "gumbeljax.nnx": frozenset({"jax", "numpy", "flax"}),
    "gumbeljax.models*": frozenset({"jax", "numpy", "flax", "tokenizers", "gguf", "safetensors"}),
    "gumbeljax.__main__": frozenset({"jax", "numpy", "rich"}),
    "gumbeljax.cli*": frozenset({"jax", "numpy", "rich", "flax", "matplotlib"}),
    "gumbeljax._typing": frozenset({"jax", "numpy", "jaxtyping"}),
    "gumbeljax*": frozenset({"jax", "numpy"}),
}


def read_sources(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Source text of every module of the packages, by dotted name."""
    sources = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return sources


def first_match(name: str, table: Mapping[str, object]) -> str | None:
    """The entry of the table for a name: itself, else the first pattern that fits."""
    return name if name in table else next((pattern for pattern in table if fnmatchcase(name, pattern)), None)


def imports(name: str, source: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that a module imports, at the top, inside functions or by import_module("...").

    `from a import b` counts as the module a.b when there is one, else as a.
    """
    is_package = any(module.startswith(name + ".") for module in modules)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = [*name.split("."), *["__init__"] * is_package]
            package = here[: len(here) - node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            for alias in node.names:
                # `from jax import _src` names a module of another package: keep both parts.
                inside = base.split(".")[0] in PACKAGES
                full = f"{base}.{alias.name}"
                yield node.lineno, full if not inside or full in modules else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def private_jax(name: str, source: str, modules: frozenset[str] = frozenset()) -> list[str]:
    """Every place that reaches into jax._src, by import or by attribute."""
    tree = ast.parse(source)
    lines = {line for line, target in imports(name, source, modules) if target.startswith("jax._src")}
    lines |= {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "_src"}
    return [f"{name}:{line} reaches into jax._src" for line in sorted(lines)]


def violations(sources: Mapping[str, str]) -> list[str]:
    """One sentence for each broken rule; an empty list is a tree in order."""
    modules = frozenset(sources)
    found, arrows = [], {name: set() for name in sources}
    for name, source in sources.items():
        found += private_jax(name, source, modules)
        entry = first_match(name, LAYERS)
        if entry is None:
            found.append(f"{name} has no layer: add it to LAYERS in tests/layers.py")
            continue
        allowed = OUTSIDE[first_match(name, OUTSIDE)]
        for line, target in imports(name, source, modules):
            top = target.split(".")[0]
            if top not in PACKAGES:
                if top not in allowed and top not in sys.stdlib_module_names:
                    found.append(f"{name}:{line} imports {top}; it may import {', '.join(sorted(allowed))}")
                continue
            if target not in modules:
                found.append(f"{name}:{line} imports {target}, which is not a module")
                continue
            arrows[name].add(target)
            layer, below = LAYERS[entry], LAYERS.get(first_match(target, LAYERS), 0)
            if below > layer:
                found.append(f"{name}:{line} (layer {layer}) imports {target} (layer {below}): arrows point down")
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        found.append(f"imports form a cycle: {' <- '.join(error.args[1])}")
    return found
