"""One of two processes with four CPU devices each: draws on meshes that span both and prints what it can see, as JSON.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.sharding.one_of_two PORT ID

Run by tests/sharding/test_processes.py. Every process holds its own part of the table only.
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, VOCAB, D = 16, 1024, 32
MESHES = {"tp=8": (1, 8), "data=4, tp=2": (4, 2)}


def problem():
    """The same numbers in every process, and exact in any order of summation."""
    rng = np.random.default_rng(0)
    h = rng.integers(-1, 2, (ROWS, D)).astype(np.float32)
    return h, (rng.integers(-1, 2, (VOCAB, D)) / 2).astype(np.float32), rng.integers(0, VOCAB, ROWS).astype(np.int32)


def spread(x, mesh, spec):
    """A global array of which this process makes its own shards."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def local(x) -> dict[str, list]:
    """What this process holds of a result: rows by their place."""
    rows = {}
    for shard in x.addressable_shards:
        start = shard.index[0].start or 0
        rows |= {str(start + i): value for i, value in enumerate(np.asarray(shard.data).tolist())}
    return rows


def draws(kind: AxisType) -> dict:
    import gumbeljax
    from gumbeljax import sharding

    h, w, tokens = problem()
    found = {}
    for name, shape in MESHES.items():
        mesh = jax.make_mesh(shape, ("data", "tp"), axis_types=(kind, kind))
        arrays = spread(h, mesh, P("data")), spread(w, mesh, P("tp")), jax.random.key(3)
        scored = (*arrays[:2], spread(tokens, mesh, P("data")))
        how = {"mesh": mesh, "axis_name": "tp", "data_axis": "data"}
        draw, score = gumbeljax.sample_with_log_probs, gumbeljax.log_prob
        if kind == AxisType.Auto:
            draw, score = sharding.on_mesh(draw, **how), sharding.on_mesh(score, **how)
        out = jax.jit(draw)(*arrays)
        found[name] = [local(out.token), local(out.tempered_log_prob), local(jax.jit(score)(*scored))]
    assert local(draw(*arrays).token) == local(out.token)  # eagerly
    return found


if __name__ == "__main__":
    port, process = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", 2, int(process))
    assert jax.device_count() == 8 and jax.local_device_count() == 4 and jax.process_index() == int(process)
    print(json.dumps({kind.name: draws(kind) for kind in (AxisType.Auto, AxisType.Explicit)}), flush=True)
