"""A Flax NNX module that draws tokens with the random streams NNX users already have."""

from flax import nnx

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
