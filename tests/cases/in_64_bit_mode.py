"""What a process with JAX_ENABLE_X64=1 draws, and in which dtypes; run by `test_dtypes.py`, which reads the JSON it prints."""

import json

import jax
import jax.numpy as jnp
import numpy as np

import gumbeljax
from gumbeljax import reference, relaxation
from tests.cases import routes

LOGITS = np.array([-1.0, -1.3, -1.7, -2.1, -2.6, -3.0, -3.5, -4.1, -4.6], np.float32)


def draws() -> dict[str, list]:
    """Tokens of 1000 keys of nine float32 logits, by the routes that differ."""
    rows = np.tile(LOGITS, (1000, 1))
    keys, t = routes.keys_of(42, 1000), jnp.ones(1000, jnp.float32)
    chosen = [routes.by_head, routes.by_logits, routes.by_categorical, routes.by_reference]
    found = {r.__name__: np.asarray(r(rows, keys, t)[0]).tolist() for r in chosen}
    if routes.plt is not None:
        found["by_triton"] = np.asarray(routes.by_triton(rows[:60], keys[:60], t[:60])[0]).tolist()
    return found


def dtypes(dtype) -> dict[str, list[str]]:
    """The dtypes of everything that every entry point returns for h and w of one dtype, options being float64."""
    h, w = jnp.ones((6, 16), dtype), jnp.ones((40, 16), dtype)
    options = {"temperature": np.full(6, 0.7), "logit_bias": np.zeros(40), "mask": np.ones(40, bool), "scale": 0.5,
               "soft_cap": 30.0, "valid_vocab": 33}
    key, found = jax.random.key(0), {}
    ways = {"one": {}, "distinct": {"num_samples": 2, "replace": False},
            "categorical": {"method": "categorical"}}
    for name, more in ways.items() if dtype == "float32" else [("one", {})]:
        out = gumbeljax.sample_with_log_probs(h, w, key, **options, **more)
        found[name] = [str(x.dtype) for x in out]
    options.pop("temperature")
    greedy = gumbeljax.greedy(h, w, **options)
    found["greedy"] = [str(greedy.dtype)]
    found["log_prob"] = [str(gumbeljax.log_prob(h, w, np.arange(6, dtype=np.int64), temperature=0.5, **options).dtype)]
    found["empty"] = [str(gumbeljax.sample(h[:0], w, key).dtype), str(gumbeljax.log_prob(h[:0], w, greedy[:0]).dtype)]
    found["sample_logits"] = [str(gumbeljax.sample_logits(h, key).dtype)]
    if routes.plt is not None and dtype == "float32":
        found["triton"] = [str(x.dtype) for x in routes.triton_draw(h, w, key)]
    return found


def gradients(dtype) -> list[str]:
    h, w = jnp.ones((6, 16), dtype), jnp.ones((40, 16), dtype)
    out = jax.grad(lambda h, w: gumbeljax.log_prob(h, w, np.arange(6)).sum(), (0, 1))(h, w)
    return [str(x.dtype) for x in out]


def carry() -> list:
    """A scan whose carry is an int32 token."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=(40, 16)), jnp.float32)

    def step(token, i):
        token = gumbeljax.sample(w[token], w, jax.random.fold_in(jax.random.key(0), i))
        return token, token

    last, tokens = jax.jit(lambda: jax.lax.scan(step, jnp.int32(3), jnp.arange(10)))()
    return [str(last.dtype), tokens.tolist()]


def others() -> list[str]:
    key = jax.random.key(0)
    tokens = [f(LOGITS, key).dtype for f in (reference.inverse_cdf, reference.gumbel_max, reference.grouped_gumbel_max)]
    return [str(d) for d in (*tokens, relaxation.gumbel_softmax(LOGITS, key).dtype)]


NAMES = ("float32", "bfloat16")


def report() -> dict:
    return {"enabled": jax.config.jax_enable_x64, "draws": draws(), "dtypes": {d: dtypes(d) for d in NAMES},
            "gradients": {d: gradients(d) for d in NAMES}, "carry": carry(), "others": others()}


if __name__ == "__main__":
    print(json.dumps(report()))
