r"""Sequential Monte Carlo: weighted particles that are moved, weighed and resampled, for many groups at once.

A group of n particles :math:`x_i` with weights :math:`w_i` stands for a law :math:`\pi(x) / Z`. One step

1. resamples the groups whose effective sample size is below `threshold` x n, and gives their particles weight 1;
2. moves every particle, :math:`x' \sim q(\cdot \mid x)`;
3. multiplies its weight by what the move owes to the target, for example :math:`\pi(x') / (\pi(x)\, q(x' \mid x))`.

The estimate of Z is the product of the mean weights before each resampling and of that at the end. It is unbiased,
:math:`E[\hat Z] = Z`, for any number of particles. Averages over the particles, and the law of one particle drawn from them
by `choose`, are *approximate*: their bias is of order 1 / n.

Source: A. Doucet, A. M. Johansen, "A tutorial on particle filtering and smoothing", 2009.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks
from gumbeljax._call import plain_broadcasting
from gumbeljax._keys import as_threefry, row_keys, typed_key, wrong_shape
from gumbeljax._mesh import check_rows
from gumbeljax._typing import Array, ArrayLike, Key
from gumbeljax.smc.ess import ess, log_mean_weight, log_weights_and_mask
from gumbeljax.smc.resampling import multinomial, systematic
from pallas_kernels import noise


class State(NamedTuple):
    """Particles and what they weigh. A pytree of arrays that can be the carry of a loop.

    `particles`: any pytree; leaves `[*groups, n, ...]`, or scalars, which belong to all. `log_weights` f32 `[*groups, n]`,
    since the last resampling, with the potential in them; -inf for dead ones. `log_potential` f32 `[*groups, n]`, 0 without
    a `potential_fn`. `log_z` f32 `[*groups]`, up to the last resampling: `log_evidence` has all of it. `mask` bool
    `[*groups, n]`, the particles that live: groups may have fewer than n.
    """

    particles: Any
    log_weights: Array
    log_potential: Array
    log_z: Array
    mask: Array


class Info(NamedTuple):
    """What a resampling saw and did. `ess` f32 `[*groups]`, before it; NaN in a group without a law. `resampled` bool
    `[*groups]`. `ancestors` int32 `[*groups, n]`: each particle's own index where nothing was resampled."""

    ess: Array
    resampled: Array
    ancestors: Array


@plain_broadcasting()
def init(particles: Any, log_weights: ArrayLike, *, mask: ArrayLike | None = None,
         potential_fn: Callable | None = None) -> State:
    """The state before the first step.

    Args:
      particles: pytree with leaves `[*groups, n, ...]`; scalar leaves are shared.
      log_weights: `[*groups, n]`, zeros for particles drawn from the law they stand for.
      mask: bool `[n]` or `[*groups, n]`, True for particles that live; all by default.
      potential_fn: as in `step`; the potential of the first particles is added to their weights.

    Returns:
      A `State`.

    Raises:
      ValueError, TypeError: log-weights or a mask that `ess` would refuse; a leaf with another leading shape.

    >>> state = init({"position": jnp.zeros((2, 4))}, jnp.zeros((2, 4)), mask=jnp.arange(4) < 3)
    >>> log_evidence(state)
    Array([0., 0.], dtype=float32)
    """
    log_weights = log_weights_and_mask(log_weights, mask).astype(jnp.float32)
    alive = jnp.ones(log_weights.shape, bool) if mask is None else jnp.broadcast_to(jnp.asarray(mask), log_weights.shape)
    for leaf in jax.tree.leaves(particles):
        if jnp.ndim(leaf) and jnp.shape(leaf)[: log_weights.ndim] != log_weights.shape:
            raise ValueError(f"particles must have leaves that are scalars or begin with the shape of log_weights "
                             f"{list(log_weights.shape)}; got {list(jnp.shape(leaf))}: give every particle its own.")
    potential = jnp.zeros_like(log_weights)
    if potential_fn is not None:
        potential = _per_particle(potential_fn(particles), log_weights.shape, "potential_fn")
    dead = ~alive | (log_weights == -jnp.inf)  # whatever their potential is
    log_weights = jnp.where(dead, -jnp.inf, log_weights + potential)
    return State(particles, log_weights, potential, jnp.zeros(log_weights.shape[:-1], jnp.float32), alive)


@plain_broadcasting()
def step(state: State, key: Key, *, propose_fn: Callable, log_weight_fn: Callable, resample_fn: Callable = systematic,
         threshold: ArrayLike = 0.5, potential_fn: Callable | None = None) -> tuple[State, Info]:
    """Resamples where that is due, then moves and weighs all particles.

    Approximate at a finite number of particles, except that the estimate of Z is unbiased.

    Args:
      state: of `init` or of a step.
      key: one key for this step (group i, row-major, has `fold_in(key, i)`), or keys `[*groups]`. Particle i of a group moves
        with `fold_in(group key, i)`, by its place and not by its ancestor, so that two children of one parent part.
      propose_fn: `(particles, keys [*groups, n]) -> (particles, aux)`: the particles moved, and whatever weighing them needs.
      log_weight_fn: `(particles, aux) -> [*groups, n]`: logs of the factors of the weights; 0 for a particle that is done.
      resample_fn: `systematic`, `stratified`, `residual`, `multinomial`, or any function with their signature.
      threshold: number or `[*groups]`. A group is resampled when its ESS is below `threshold` x its living particles: never
        at 0, always at 1 unless all weights are equal. One particle is never resampled.
      potential_fn: None, or `particles -> [*groups, n]`, the log of a factor G(x) that rewards (or, with -inf, forbids) what a
        particle is so far: a step multiplies weights by G(x') / G(x), so that the law is weighted by G of the last particle,
        and by nothing else. A particle of potential -inf stays dead.

    Returns:
      The new `State`, and the `Info` of the resampling, which came first.

    Raises:
      ValueError, TypeError: a function whose result has another shape; keys of another shape.

    >>> import jax
    >>> def propose_fn(x, keys):
    ...     steps = jax.vmap(jax.random.normal)(keys)
    ...     return x + steps, steps
    >>> state = init(jnp.zeros(100), jnp.zeros(100))
    >>> state, info = step(state, jax.random.key(0), propose_fn=propose_fn, log_weight_fn=lambda x, steps: -(x**2))
    >>> bool(info.resampled), bool(abs(log_evidence(state) - jnp.log(3 ** -0.5)) < 0.2)
    (False, True)
    """
    keys = _group_keys(key, state.log_weights)
    state, info = resample(state, keys, resample_fn=resample_fn, threshold=threshold)
    particles, aux = propose_fn(state.particles, _particle_keys(keys, state.log_weights.shape))
    change = _per_particle(log_weight_fn(particles, aux), state.log_weights.shape, "log_weight_fn")
    potential = state.log_potential
    if potential_fn is not None:
        potential = _per_particle(potential_fn(particles), state.log_weights.shape, "potential_fn")
        change = change + jnp.where(state.log_potential == -jnp.inf, -jnp.inf, potential - state.log_potential)
    dead = ~state.mask | (state.log_weights == -jnp.inf)  # whatever they did: -inf + inf must not bring them back
    log_weights = jnp.where(dead, -jnp.inf, state.log_weights + change)
    return State(particles, log_weights, potential, state.log_z, state.mask), info


@plain_broadcasting()
def resample(state: State, key: Key, *, resample_fn: Callable = systematic, threshold: ArrayLike = 0.5) -> tuple[State, Info]:
    """The resampling of `step` on its own, for a particle whose cache is moved by its ancestors elsewhere.

    Unbiased: a particle of normalised weight w gets n w copies on average. All leaves follow the same ancestors; weights
    become 1 in the groups that were resampled, and only there. In a group with m < n living particles the m live slots
    take evenly spaced outputs of `resample_fn`, from a random one on, and the dead ones stay dead.

    Args: as `step`.

    >>> import jax
    >>> state = init(jnp.array([10, 20, 30]), jnp.array([-jnp.inf, 0.0, -jnp.inf]))
    >>> state, info = resample(state, jax.random.key(0))
    >>> state.particles.tolist(), state.log_weights.tolist(), round(float(jnp.exp(state.log_z)), 4)
    ([20, 20, 20], [0.0, 0.0, 0.0], 0.3333)
    """
    keys = _group_keys(key, state.log_weights)
    shape, n = state.log_weights.shape, state.log_weights.shape[-1]
    size = ess(state.log_weights, mask=state.mask)
    num_alive = jnp.sum(state.mask, axis=-1)
    share = _checks.per_row(threshold, "threshold", size.shape).reshape(size.shape)
    if not any(map(_checks.is_traced, jax.tree.leaves(threshold))) and np.any(np.isnan(np.asarray(threshold, np.float64))):
        raise ValueError(f"threshold must be a number; got {threshold}: pass 0 for never, 1 for always.")
    due = size < share * num_alive  # never where the ESS is NaN
    own = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), shape)
    drawn = _checks.as_array(resample_fn(state.log_weights, keys, mask=state.mask), "the result of resample_fn")
    if drawn.shape != shape or not _checks.is_integral(drawn):
        raise ValueError(f"resample_fn must return integers {list(shape)}, an ancestor of each particle; got {drawn.dtype}"
                         f"{list(drawn.shape)}: leave its num_samples out.")
    drawn = jnp.take_along_axis(drawn, _slots(state.mask, keys), axis=-1)
    ancestors = jnp.where(due[..., None] & state.mask, drawn, own)
    log_weights = jnp.where(due[..., None] & state.mask, 0.0, state.log_weights)
    log_z = state.log_z + jnp.where(due, log_mean_weight(state.log_weights, mask=state.mask), 0.0)
    particles, potential = gather((state.particles, state.log_potential), ancestors)
    return State(particles, log_weights, potential, log_z, state.mask), Info(size, due, ancestors)


def gather(particles: Any, ancestors: Array) -> Any:
    """Every leaf `[*groups, n, ...]` at its `ancestors [*groups, m]`; scalars as they are.

    >>> gather((jnp.array([[1, 2], [3, 4]]), 5), jnp.array([[1, 1], [0, 1]]))[0].tolist()
    [[2, 2], [3, 4]]
    """
    ancestors = jnp.asarray(ancestors)
    groups = ancestors.shape[:-1]
    where = [jnp.arange(size).reshape(-1, *[1] * (len(groups) - axis)) for axis, size in enumerate(groups)]
    return jax.tree.map(lambda x: jnp.asarray(x)[(*where, ancestors)] if jnp.ndim(x) else x, particles)


@plain_broadcasting()
def log_evidence(state: State) -> Array:
    """log of the unbiased estimate of Z, f32 `[*groups]`: -inf when all particles have died, NaN in a group without any.

    >>> log_evidence(init(jnp.zeros(2), jnp.log(jnp.array([0.5, 0.25]))))
    Array(-0.98082924, dtype=float32)
    """
    return state.log_z + log_mean_weight(state.log_weights, mask=state.mask)


@plain_broadcasting()
def choose(state: State, key: Key) -> Array:
    """One particle per group, drawn by weight: int32 index `[*groups]`, -1 in a group without a law.

    Exact in distribution given the particles. Noise is that of resampling, so not with the key of a step.

    >>> import jax
    >>> choose(init(jnp.zeros(3), jnp.array([-jnp.inf, 0.0, -jnp.inf])), jax.random.key(0))
    Array(1, dtype=int32)
    """
    return multinomial(state.log_weights, _group_keys(key, state.log_weights), num_samples=1, mask=state.mask)[..., 0]


def _group_keys(key: Key, log_weights: Array) -> Array:
    """Keys `[*groups]`: as given, or `fold_in(key, i)`."""
    key, groups = as_threefry(typed_key(key)), log_weights.shape[:-1]
    check_rows(log_weights, key, None, (), way_out="one key per group, sharded like log_weights")
    if key.shape == groups:
        return key
    if key.shape != ():
        raise wrong_shape(key, groups)
    return jax.random.wrap_key_data(jnp.stack(row_keys(key, groups), -1), impl="threefry2x32").reshape(groups)


def _particle_keys(keys: Array, shape: tuple[int, ...]) -> Array:
    flat = jax.vmap(lambda k: jax.vmap(lambda i: jax.random.fold_in(k, i))(jnp.arange(shape[-1])))(keys.reshape(-1))
    return flat.reshape(shape)


def _slots(mask: Array, keys: Array) -> Array:
    """Which output of a resampling each slot takes. All n live: its own. m of n: slot k of them takes output
    `floor(k n / m) + r mod n` with r uniform, so that each slot is any output equally often, and together they are spread."""
    n = mask.shape[-1]
    rank = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1
    num_alive = jnp.maximum(jnp.sum(mask, axis=-1, dtype=jnp.int32), 1)[..., None]
    key0, key1 = (x.reshape(mask.shape[:-1]) for x in row_keys(keys, keys.shape))
    word, _ = noise.threefry2x32(key0, key1, noise.stream(noise.RESAMPLING, 1, 0), jnp.uint32(0))
    turn = jnp.where(num_alive == n, 0, (word % jnp.uint32(n)).astype(jnp.int32)[..., None])
    return jnp.where(mask, (rank * n // num_alive + turn) % n, 0)


def _per_particle(x: Any, shape: tuple[int, ...], name: str) -> Array:
    x = _checks.as_array(x, f"the result of {name}")
    if x.shape != shape:
        raise ValueError(f"{name} must return one number for each particle, {list(shape)}; got {list(x.shape)}: sum over the "
                         "other axes.")
    return x.astype(jnp.float32)
