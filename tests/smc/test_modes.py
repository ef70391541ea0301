"""Every function with 64-bit numbers on and rank promotion forbidden: same values, same dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import smc

GROUPS, N = 3, 12
WEIGHTS = np.random.default_rng(0).normal(size=(GROUPS, N)).astype(np.float32)
WEIGHTS[1, 3:] = -np.inf
MASK = np.arange(N) < 9
LOGITS = np.random.default_rng(1).normal(size=(2, 4, 17)).astype(np.float32)
SCHEMES = (smc.systematic, smc.stratified, smc.residual, smc.multinomial)


def propose(particles, keys):
    steps = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, dtype=jnp.float32)))(keys)
    return {"x": particles["x"] + steps, "shared": particles["shared"]}, steps


def a_run(key):
    """States, infos, choice and evidence of a few steps with a potential, in a scan."""
    state = smc.init({"x": jnp.zeros((GROUPS, N), jnp.float32), "shared": jnp.float32(1)}, WEIGHTS, mask=MASK,
                     potential_fn=lambda p: -jnp.abs(p["x"]))

    def one(state, key):
        return smc.step(state, key, propose_fn=propose, log_weight_fn=lambda p, steps: -(steps**2), resample_fn=smc.stratified,
                        potential_fn=lambda p: -jnp.abs(p["x"]), threshold=jnp.array([0.5, 1.0, 0.2]))

    state, info = jax.lax.scan(one, state, jax.random.split(key, 4))
    return state, info, smc.log_evidence(state), smc.choose(state, key), smc.resample(state, key)


def weights(key):
    """The algebra of speculative particles."""
    tokens = jnp.asarray(np.arange(24).reshape(2, 3, 4) % 5, jnp.int32)
    cut = smc.cut_tokens(tokens, jnp.zeros((2, 3), bool), jnp.array([[1, 2, 3], [4, 5, 6]]), eos=3)
    log_p, log_q = jnp.asarray(LOGITS[:, :3, :4]), jnp.asarray(LOGITS[:, 1:, 4:8])
    shared = smc.first_token_keys(jax.random.split(key, 2), 3, alpha=jnp.array([1.0, 2.0]))
    weight = smc.log_weight(log_p, log_q, kept=cut.kept, alpha=2.0)
    return cut, weight, smc.bonus_temperature(0.7, 2.0), jax.random.key_data(shared)


CALLS = {
    "ess": lambda key: (smc.ess(WEIGHTS), smc.log_ess(WEIGHTS, mask=MASK), smc.normalize(WEIGHTS),
                        smc.log_mean_weight(WEIGHTS, mask=MASK)),
    **{scheme.__name__: lambda key, scheme=scheme: (
        scheme(WEIGHTS, key), scheme(WEIGHTS, jax.random.split(key, GROUPS), num_samples=30, mask=MASK),
        scheme(jnp.zeros(200), key, num_samples=100)) for scheme in SCHEMES},
    "steps": a_run,
    "weights": weights,
    "gather": lambda key: smc.gather({"x": jnp.asarray(WEIGHTS), "shared": 3}, jnp.asarray([[1, 0], [2, 2], [5, 5]])),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_modes_change_nothing(name):
    want = CALLS[name](jax.random.key(3))
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        got = CALLS[name](jax.random.key(3))
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        if hasattr(a, "dtype"):
            assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
