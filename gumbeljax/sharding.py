"""Draws on a mesh, for those who do not write their own `shard_map`.

There are three ways to draw from a head `w` whose vocabulary is cut over devices, and they give the same tokens:

- inside your own `shard_map`, pass `axis_name` to the functions of `gumbeljax`;
- with explicit axes (`jax.make_mesh`'s default), call them as usual: the types of `h` and `w` say how they are cut;
- with auto axes, where a traced array does not know its sharding, use `sample_sharded` or `on_mesh`.

The law is the same as on one device. Pathwise exact when every shard starts at a multiple of 16 tokens (`pad_vocab` sees to
it): the same token for the same key on any mesh. Otherwise exact in distribution: the groups of a shard are counted from
its first token, so a cut inside a group of the whole vocabulary changes which noise is used.
"""

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gumbeljax import _checks, _mesh, _partition
from gumbeljax._typing import Array, ArrayLike, Key
from gumbeljax.sampling import sample
from pallas_kernels.noise import GROUP


def pad_vocab(w: ArrayLike, num_shards: int, *, vocab_axis: int = 0) -> ArrayLike:
    """`w` (with its scales, if quantised) with zero rows appended, so that `num_shards` shards are equally wide and start at
    multiples of 16 tokens.

    Do it once, when the model is loaded, and pass the old number of tokens as `valid_vocab` from then on: a row of zeros
    has logit 0, and `valid_vocab` keeps it out of the law.

    >>> import jax.numpy as jnp, gumbeljax
    >>> gumbeljax.sharding.pad_vocab(jnp.ones((100, 8)), 4).shape
    (128, 8)
    """
    num_shards = _checks.count(num_shards, "num_shards")
    if _checks.is_quantized(w):
        if vocab_axis not in (0, -2):
            raise ValueError(f"vocab_axis must be 0 for a quantised w; got {vocab_axis!r}: leave it out.")
        rows = lambda x: jnp.pad(x, [(0, -x.shape[0] % (GROUP * num_shards))] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
        return jax.tree.map(rows, w)
    w = _checks.as_array(w, "w")
    if w.ndim != 2 or vocab_axis not in (0, 1, -1, -2):
        raise ValueError(f"w must be [vocab, d_model], or [d_model, vocab] with vocab_axis=1; got shape {list(w.shape)} with "
                         f"vocab_axis={vocab_axis!r}: pass the output table.")
    padding = -w.shape[vocab_axis] % (GROUP * num_shards)
    return jnp.pad(w, [(0, padding if axis == vocab_axis % 2 else 0) for axis in (0, 1)])


def on_mesh(fn: Callable, *, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
            axis_name: str | tuple[str, ...], data_axis: str | tuple[str, ...] | None = None) -> Callable:
    """`gumbeljax.sample`, `sample_with_log_probs`, `greedy` or `log_prob` on a mesh: takes and returns whole arrays.

    Args:
      fn: one of these functions.
      mesh: the mesh; None for that of `jax.set_mesh`, or of the `shard_map` around the call.
      axis_name: the mesh axes that cut the vocabulary of `w`, the last one fastest.
      data_axis: the mesh axes that cut the first axis of the batch, or None. Every row keeps the noise of its place in the
        whole batch, so one key for the batch will do.

    Returns:
      A function of the arguments of `fn`. `w` need not be placed, but one that is not is moved at every call.

    Raises:
      ValueError, TypeError: a name that is no axis of the mesh, or sizes that the shards do not divide; as `fn`.
    """
    axes, rows = _mesh.names_of(axis_name), _mesh.names_of(data_axis, "data_axis")
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh | None):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or None; got {type(mesh).__name__}: make one with jax.make_mesh.")
    if any(p.kind == p.VAR_KEYWORD for p in inspect.signature(fn).parameters.values()):
        raise TypeError(f"fn must be gumbeljax.sample, sample_with_log_probs, greedy or log_prob; got {fn}: gather w for other "
                        "functions.")

    def call(h, w, *args, **options):
        context = jax.sharding.get_abstract_mesh()
        where = mesh if context.empty else context
        if where is None:
            raise ValueError("mesh must be given when none is around the call; got None: pass mesh, or call jax.set_mesh.")
        kinds = dict(zip(where.axis_names, where.axis_types, strict=True))
        free = frozenset(name for name, kind in kinds.items() if kind != jax.sharding.AxisType.Manual)
        for argument, names in (("axis_name", axes), ("data_axis", rows)):
            for name in names:
                if name not in free:
                    raise ValueError(f"{argument} must name axes of the mesh, {_mesh.quoted(free)}; got {name!r}: pass one of "
                                     "these.")
        h, w = (x if hasattr(x, "dtype") or _checks.is_quantized(x) else np.asarray(x, np.float32) for x in (h, w))
        batch = h.ndim - 1
        if rows and batch < 1:
            raise ValueError("data_axis must be None for an h of rank 1, which has no rows to cut; got "
                             f"{data_axis!r}: leave it out.")
        if options.get("method") == "categorical":
            return _by_xla(fn, where, axes, rows, h, w, *args, **options)
        layout = _partition.Layout(where, free, axes, (rows, *(None,) * (batch - 1)) if rows else (None,) * batch)
        given = inspect.signature(fn).bind(h, w, *args, **options).arguments
        return _partition.run(fn, layout, h, w, {k: v for k, v in given.items() if k not in ("h", "w")})

    return call


def _by_xla(fn: Callable, mesh, axes: tuple[str, ...], rows: tuple[str, ...], h, w, *args, **options):
    """`method="categorical"`: XLA partitions the plain call. Its noise is that of the logits' places in the whole array, made
    where they are, and its argmax exchanges a score and an id of each shard. Sorting would gather logits, so it is refused."""
    kinds = {kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if name in (*axes, *rows)}
    if kinds - {jax.sharding.AxisType.Auto}:
        raise NotImplementedError("method='categorical' on a cut vocabulary is partitioned by XLA, over auto axes; got "
                                  f"{_mesh.quoted((*axes, *rows))} of another kind: make the mesh with AxisType.Auto, or leave "
                                  "method out.")
    sorts = [name for name in ("top_k", "top_p", "min_p") if options.get(name) is not None]
    if options.get("replace") is False or sorts:
        raise NotImplementedError("method='categorical' on a cut vocabulary is for draws with replacement and without filters; "
                                  f"got {sorts[0] if sorts else 'replace=False'}: leave method out.")
    vocabulary = P(axes) if options.get("vocab_axis", 0) % 2 == 0 else P(None, axes)
    put = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # noqa: E731
    return fn(put(h, P(rows or None)), jax.tree.map(lambda x: put(x, vocabulary), w), *args, **options)


def sample_sharded(h: ArrayLike, w: ArrayLike, key: Key, *, mesh: jax.sharding.Mesh | None = None,
                   axis_name: str | tuple[str, ...], data_axis: str | tuple[str, ...] | None = None, **options) -> Array:
    """Tokens as `gumbeljax.sample(h, w, key, **options)`, from a table cut over the mesh axes `axis_name`.

    Pathwise exact when every shard starts at a multiple of 16 tokens, else exact in distribution. Each shard draws from its
    own ids, then one all-gather moves 20 bytes per row and shard, and nothing else moves. With top_k, top_p or min_p one or
    two small collectives before it agree on the kept set, which is that of one device (and a few more if it is large: see
    docs/sharding.md). Works inside `jit`, eagerly, and inside a `shard_map` over other axes.

    Args: as `gumbeljax.sample` and `on_mesh`.

    Returns:
      int32 tokens `[*batch]` (or `[*batch, num_samples]`), the same on all shards of the vocabulary.

    >>> import jax, jax.numpy as jnp, gumbeljax
    >>> mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> w = jnp.zeros((32, 8)).at[7].set(9.0)
    >>> gumbeljax.sample_sharded(jnp.ones((2, 8)), w, jax.random.key(0), mesh=mesh, axis_name="tp").tolist()
    [7, 7]

    Source: "FlashSampling", arXiv 2603.15854 (a local sample and a log mass from each shard).
    """
    return on_mesh(sample, mesh=mesh, axis_name=axis_name, data_axis=data_axis)(h, w, key, **options)
