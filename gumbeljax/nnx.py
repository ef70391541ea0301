"""Flax NNX: a module that draws tokens with the random streams its users have, and modules as models of decode loops."""

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"gumbeljax.nnx must have the package {error.name}, got none; run pip install 'gumbeljax[flax]'.", name=error.name
    ) from error

from gumbeljax._typing import Array, ArrayLike
from gumbeljax.sampling import sample


class Sampler(nnx.Module):
    """``gumbeljax.sample`` with a fresh key from the stream ``rngs.sample`` at every call.

    Pathwise exact: the token is that of ``sample(h, w, rngs.sample())``.

    A call advances the stream's counter. ``nnx.jit`` (and the other ``nnx`` transforms) carry that change out; plain
    ``jax.jit`` drops it, so the same tokens are drawn at every call: use ``nnx.jit``, or the functional
    ``gumbeljax.sample`` with a ``key`` argument. In a decode loop prefer ``gumbeljax.decode``, whose keys follow the
    position of the token, so that a request does not depend on its neighbours.

    Args:
      rngs: the streams; ``sample`` is taken, or ``default`` where there is none of that name.
      options: keyword arguments of ``gumbeljax.sample`` for every call.

    >>> import jax.numpy as jnp
    >>> sampler = Sampler(rngs=nnx.Rngs(sample=0), temperature=0.0)
    >>> int(sampler(jnp.array([1.0, 0.0]), jnp.array([[0.0, 1.0], [3.0, 1.0]])))
    1
    """

    def __init__(self, *, rngs: nnx.Rngs, **options):
        self.rngs = rngs
        self.options = nnx.data(options)

    def __call__(self, h: ArrayLike, w: ArrayLike, **options) -> Array:
        """Tokens ``[*batch]`` of ``h [*batch, d_model]`` and ``w [vocab, d_model]``; options win over the module's."""
        return sample(h, w, self.rngs.sample(), **{**self.options, **options})


class DecodeFn:
    """The pure form of a module: ``(params, tokens, positions, cache) -> (h, cache)``; equal modules compare equal."""

    def __init__(self, graphdef: nnx.GraphDef):
        self.graphdef = graphdef
        self._hash = hash(graphdef)  # milliseconds for a deep model, and jit asks before every chunk

    def __call__(self, params, tokens, positions, cache):
        # Copied: in the body of a loop these variables belong to an outer trace, and a transform of the module's own
        # (nnx.remat, nnx.scan over layers) may not update those.
        return nnx.merge(self.graphdef, params, copy=True)(tokens, positions, cache)

    def __eq__(self, other):
        return self is other or (isinstance(other, DecodeFn) and self.graphdef == other.graphdef)

    def __hash__(self):
        return self._hash


def as_decode_fn(model: nnx.Module) -> tuple[DecodeFn, nnx.State]:
    """Split an NNX module into the callable and the parameters that ``gumbeljax.decode`` takes.

    The module's ``__call__`` is ``(tokens int32[batch, seq], positions int32[batch, seq], cache) -> (h, cache)`` with
    ``h [batch, seq, d_model]``; ``gumbeljax.kv_cache`` has caches and attention over them, ``examples/own_model.py`` a
    whole model. The parameters go through ``jit`` as arguments: constants closed over would be folded at compile time.
    """
    graphdef, params = nnx.split(model)
    return DecodeFn(graphdef), params
