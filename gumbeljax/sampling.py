"""Draw tokens from `softmax(h @ w.T)` without writing the logits.

Options shared by the functions of this file and of `gumbeljax.scoring`::

  temperature: number or `[*batch]`, finite and >= 0. The law is `softmax(l / temperature)`; 0 is greedy for that row
    (so is anything below 2^-100). Traced; rows may differ.
  top_k, top_p, min_p: number or `[*batch]`, traced: filters on the tempered law, in this order; top_p acts on what top_k left
    and keeps the token that crosses it; equal logits are kept lowest id first. 0 or -1, 1, and 0 are off.
  valid_vocab: Python int. Ids from it on are padding of the table: never drawn, without mass in any law.
  logit_bias: float `[vocab]` or `[*batch, vocab]`, or a dict from token id to bias, added to the logits.
  mask: bool `[vocab]` or `[*batch, vocab]`, True for tokens that may be drawn, or the same packed into uint32 words.
  processors: `gumbeljax.Processors`, the rare options: penalties, sparse bias, token lists, minimum length.
  vocab_axis: 0 (or -2) for w `[vocab, d_model]`, 1 (or -1) for w `[d_model, vocab]`. Both are read in place.
  scale, soft_cap: Python numbers c of the model: `l = soft_cap * tanh(scale * (h @ w.T) / soft_cap)`.
  precision: of float32 products: None or "highest" (float32), "high" (three TF32 products), "default" (one; the
    device's own choice). bfloat16 and float16 products are exact in float32 in any case. Sums are float32.
  implementation: None (chosen for the device), "xla", "triton" or "mosaic" (a named one runs or raises NotImplementedError), or
    a table of measured choices (`gumbeljax.autotune`, `gumbeljax.load_tuning`) that chooses first.
  axis_name: inside `jax.shard_map`, the mesh axes that cut the vocabulary of w (and of logit_bias, mask and counts), the last
    one fastest; valid_vocab, filters and token ids are those of all shards. Needed when w varies over a mesh axis; () if every
    shard has a whole table. See `gumbeljax.sharding`.
  row_offset: with one key, the index of the first row in the whole batch, for a call that sees some of its rows.

Order: `h @ w.T -> scale -> soft_cap -> [model law] -> logit_bias -> penalties -> mask -> temperature -> [tempered law] -> top_k
-> top_p -> min_p -> [processed law] -> draw`.

A row that has no law (everything masked; a NaN or +inf logit; a traced number that breaks its rule) yields token -1 and
NaN log-probabilities. No other value outside `[0, vocab)` is ever returned.
"""

import functools

import jax
import jax.numpy as jnp

from gumbeljax import _checks, _cut_ranks, _mesh, _shards, categorical
from gumbeljax._call import Config, Operands, plain_broadcasting, prepare, prepare_logits
from gumbeljax._keys import row_keys, typed_key, wrong_shape
from gumbeljax._partition import follows_shardings
from gumbeljax._tuning import Tuning
from gumbeljax._typing import Array, ArrayLike, Key, Method, Mode
from gumbeljax.processing import Processors
from pallas_kernels import filtered, many
from pallas_kernels.finish import Draw, has_law
from pallas_kernels.logits import of_model

MAX_SAMPLES = 2**23  # the noise streams of one purpose


@functools.partial(jax.jit, static_argnames=("config", "num_samples", "replace", "log_probs"))
def _draw(operands: Operands, keys, *, config: Config, num_samples, replace, log_probs) -> Draw:
    """Leaves `[rows]`, or `[num_samples, rows]`."""
    if config.axis_name and not replace:
        return _cut_ranks.rank(operands, keys, config, num_samples=num_samples, log_probs=log_probs)
    if config.axis_name:
        return _shards.draw(operands, keys, config, num_samples=num_samples, log_probs=log_probs)
    operands, keys = _mesh.vary((operands, keys))
    h, w, t, options = operands.h, operands.w, operands.t, operands.options(config)
    stages, shape = config.stages(), config.shape_arguments()
    if operands.filters is not None:
        if stages.filtered_draw is not None:
            return stages.filtered_draw(h, w, keys, t, options, operands.filters, with_log_probs=log_probs, **shape)[0]
        return filtered.draw(h, w, keys, t, options, operands.filters, num_samples=num_samples, replace=replace,
                             with_log_probs=log_probs, **shape)
    if num_samples is None:
        return stages.draw(h, w, keys, t, options, with_model=log_probs, **shape)
    model_mass = None
    if log_probs:
        model_mass = stages.mass(h, w, jnp.ones_like(t), of_model(options), **shape)
    top, total = stages.groups(h, w, t, options, **shape)
    draw = many.with_replacement if replace else many.without_replacement
    return draw(h, w, keys, t, options, top, total, model_mass, num_samples=num_samples, vocab=config.vocab,
                vocab_axis=config.vocab_axis)


def _run(operands, config, batch_shape, key, *, num_samples, replace, method, mode, log_probs, row_offset=None) -> Draw:
    """Draws by either law and gives every leaf the shape `[*batch]` or `[*batch, num_samples]`."""
    _checks.choice(method, "method", ("grouped", "categorical"))
    _checks.choice(mode, "mode", (None, "low", "high", "highest"))
    if not isinstance(replace, bool):
        raise TypeError(f"replace must be True or False, fixed when the call is traced; got {type(replace).__name__}: "
                        "make it a constant.")
    if mode is not None and method != "categorical":
        raise ValueError(f"mode must be None with method='grouped', whose noise has no modes; got {mode!r}: pass "
                         "method='categorical', or leave mode out.")
    if num_samples is None and not replace:
        raise ValueError("replace must be True for a single draw; got False: pass num_samples, or leave replace out.")
    if num_samples is not None:
        num_samples = _checks.count(num_samples, "num_samples", "pass None for one draw without an extra axis")
        vocab = config.all_vocab or config.vocab
        if not replace and num_samples > vocab:
            raise ValueError(f"num_samples must be at most the number of tokens, {vocab}, when replace=False; "
                             f"got {num_samples}: ask for fewer, or leave replace out.")
        if num_samples > MAX_SAMPLES:
            raise ValueError(f"num_samples must be at most {MAX_SAMPLES}, the samples that have noise of their own; "
                             f"got {num_samples}: draw the rest with another key.")
    if config.axis_name and method != "grouped":
        raise NotImplementedError(f"axis_name is for method='grouped'; got method={method!r}: leave method out, or call "
                                  "gumbeljax.sample_sharded on a mesh of auto axes, which XLA partitions.")
    if method == "categorical" and (axes := _mesh.explicit_axes(operands.w, config.vocab_axis)):
        raise NotImplementedError("method='categorical' on a cut vocabulary is partitioned by XLA, over auto axes; got a w "
                                  f"that is cut over explicit {_mesh.quoted(axes)}: call gumbeljax.sample_sharded on a mesh of "
                                  "auto axes, or leave method out.")
    _mesh.check_rows(operands.h, key, row_offset, config.axis_name,
                     None if operands.w is not None else "one key per row, sharded like logits")
    rows = operands.h.shape[0]
    out_shape = batch_shape if num_samples is None else (*batch_shape, num_samples)
    if rows == 0:
        row_keys(key, batch_shape, row_offset)  # for its checks
        nothing = jnp.zeros(out_shape, jnp.float32)
        return Draw(nothing.astype(jnp.int32), nothing, nothing, nothing, nothing)
    if method == "categorical":
        if config.implementation != "xla":
            raise NotImplementedError("method='categorical' is run by XLA alone; got implementation="
                                      f"{config.implementation!r}: leave implementation out.")
        key = typed_key(key)
        if key.shape not in ((), batch_shape):
            raise wrong_shape(key, batch_shape)
        with plain_broadcasting():
            out = categorical.draw(operands, config, key, batch_shape, num_samples=num_samples, replace=replace, mode=mode)
    else:
        with plain_broadcasting():
            out = _draw(operands, row_keys(key, batch_shape, row_offset), config=config, num_samples=num_samples,
                        replace=replace, log_probs=log_probs)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1).reshape(out_shape) if x.ndim > 1 else x.reshape(out_shape), out)


def _prepare_draw(h, w, method, implementation, num_samples, **options):
    """`method="categorical"` runs XLA on every device, unless another implementation was named."""
    name = "xla" if method == "categorical" and not isinstance(implementation, str) else implementation
    return prepare(h, w, implementation=name, groups=num_samples is not None, one_draw=num_samples is None, **options)


@follows_shardings
def sample(h: ArrayLike, w: ArrayLike, key: Key, *, temperature: ArrayLike = 1.0, top_k: ArrayLike | None = None,
           top_p: ArrayLike | None = None, min_p: ArrayLike | None = None, num_samples: int | None = None,
           replace: bool = True, valid_vocab: int | None = None, logit_bias: ArrayLike | None = None,
           mask: ArrayLike | None = None, processors: Processors | None = None, vocab_axis: int = 0,
           scale: float | None = None, soft_cap: float | None = None, method: Method = "grouped", mode: Mode | None = None,
           precision: str | jax.lax.Precision | None = None, implementation: str | Tuning | None = None,
           axis_name: str | tuple[str, ...] | None = None, row_offset: ArrayLike | None = None) -> Array:
    """Tokens from `softmax((h @ w.T + logit_bias) / temperature)`; without filters the logits are never written to memory.

    Pathwise exact: a row's token is a function of its logits, its key and its temperature, whatever the
    implementation, tiles, neighbours, slot or batch size (near-ties within the rounding of `h @ w.T` aside).

    The law is grouped Gumbel-max. With the vocabulary cut into groups of 16 consecutive ids, the group with the largest
    `logsumexp(l in group) + Gumbel` is drawn, then the token with the largest `l + Gumbel` in it; by max-stability of
    the Gumbel distribution the token has law softmax(l), from `vocab / 16 + 16` noise values instead of `vocab`.

    Args:
      h: hidden states `[*batch, d_model]`; bfloat16, float16 or float32.
      w: output table `[vocab, d_model]` (see `vocab_axis`); any of the same dtypes, or a `gumbeljax.QuantizedHead`.
      key: one key (row i, in row-major order, draws with `jax.random.fold_in(key, i)`; a single `h` of rank 1 with the
        key itself), or an array of keys of shape `[*batch]`. In a decode loop use
        `fold_in(request key, absolute position of the token)`, so that tokens do not depend on the batch.
      num_samples: None for one token per row, or a Python int for a last axis of that many tokens.
      replace: False draws `num_samples` distinct tokens, in the order of sampling without replacement (Plackett-Luce);
        the first is the token of a single draw. If a row has fewer tokens, the rest is -1.
      method: "grouped", or "categorical": token for token `jax.random.categorical(key, logits, mode=mode)` on float32
        logits, run by XLA with the logits in memory, for those who must not see a token change.
      mode: of `method="categorical"`: "low", "high", "highest", or None for JAX's own default.
      (the other options: see the top of `gumbeljax.sampling`)

    Returns:
      int32 tokens `[*batch]`, or `[*batch, num_samples]`; -1 for a row that has no law.

    Raises:
      ValueError, TypeError: an argument breaks its rule.
      NotImplementedError: the named implementation cannot run here.

    >>> import jax, jax.numpy as jnp, gumbeljax
    >>> w = jnp.array([[0.0, 1.0], [9.0, 1.0], [1.0, 0.0]])
    >>> int(gumbeljax.sample(jnp.array([5.0, 0.0]), w, jax.random.key(0)))
    1

    Source: C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", NeurIPS 2014; fused with the head as in
    "FlashSampling", arXiv 2603.15854.
    """
    operands, config, batch_shape = _prepare_draw(
        h, w, method, implementation, num_samples, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        valid_vocab=valid_vocab, logit_bias=logit_bias, mask=mask, processors=processors, vocab_axis=vocab_axis, scale=scale,
        soft_cap=soft_cap, precision=precision, axis_name=axis_name)
    return _run(operands, config, batch_shape, key, num_samples=num_samples, replace=replace, method=method, mode=mode,
                log_probs=False, row_offset=row_offset).token


@follows_shardings
def sample_with_log_probs(
        h: ArrayLike, w: ArrayLike, key: Key, *, temperature: ArrayLike = 1.0, top_k: ArrayLike | None = None,
        top_p: ArrayLike | None = None, min_p: ArrayLike | None = None, num_samples: int | None = None, replace: bool = True,
        valid_vocab: int | None = None, logit_bias: ArrayLike | None = None, mask: ArrayLike | None = None,
        processors: Processors | None = None, vocab_axis: int = 0, scale: float | None = None, soft_cap: float | None = None,
        method: Method = "grouped", mode: Mode | None = None, precision: str | jax.lax.Precision | None = None,
        implementation: str | Tuning | None = None,
        axis_name: str | tuple[str, ...] | None = None, row_offset: ArrayLike | None = None) -> Draw:
    """The tokens of `sample` with their log-probabilities, from the same pass over `w`.

    Pathwise exact, with the same tokens as `sample`.

    Args: as `sample`.

    Returns:
      `Draw(token, model_log_prob, tempered_log_prob, processed_log_prob, log_normalizer)`, each of the shape of the tokens,
      float32 nats: the model's own law; after bias, penalties, mask and temperature; after the filters too, which is the law
      drawn from; and `T * logsumexp(l / T)` of the tempered law (logsumexp(l) at T = 1, max(l) at T = 0). Its
      `log_kept_mass` is the log of the share of the tempered law that the filters left. NaN where the token is -1.

    Raises: as `sample`.

    >>> import jax, jax.numpy as jnp, gumbeljax
    >>> out = gumbeljax.sample_with_log_probs(jnp.ones(4), jnp.zeros((8, 4)), jax.random.key(0))
    >>> print(f"{out.model_log_prob:.4f} = -log 8")
    -2.0794 = -log 8
    """
    operands, config, batch_shape = _prepare_draw(
        h, w, method, implementation, num_samples, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        valid_vocab=valid_vocab, logit_bias=logit_bias, mask=mask, processors=processors, vocab_axis=vocab_axis, scale=scale,
        soft_cap=soft_cap, precision=precision, axis_name=axis_name)
    return _run(operands, config, batch_shape, key, num_samples=num_samples, replace=replace, method=method, mode=mode,
                log_probs=True, row_offset=row_offset)


def sample_logits(logits: ArrayLike, key: Key, *, temperature: ArrayLike = 1.0, top_k: ArrayLike | None = None,
                  top_p: ArrayLike | None = None, min_p: ArrayLike | None = None, num_samples: int | None = None,
                  replace: bool = True, valid_vocab: int | None = None, logit_bias: ArrayLike | None = None,
                  mask: ArrayLike | None = None, processors: Processors | None = None, method: Method = "grouped",
                  mode: Mode | None = None) -> Array:
    """As `sample`, for logits `[*batch, vocab]` that exist already: same law, same noise, same token.

    Pathwise exact. Noise and sums are float32 whatever the dtype of the logits.

    >>> import jax, jax.numpy as jnp, gumbeljax
    >>> gumbeljax.sample_logits(jnp.array([[0.0, 50.0], [50.0, 0.0]]), jax.random.key(0)).tolist()
    [1, 0]
    """
    operands, config, batch_shape = prepare_logits(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, valid_vocab=valid_vocab, logit_bias=logit_bias,
        mask=mask, processors=processors)
    return _run(operands, config, batch_shape, key, num_samples=num_samples, replace=replace, method=method, mode=mode,
                log_probs=False).token


@functools.partial(jax.jit, static_argnames="config")
def _greedy(operands: Operands, *, config: Config) -> Array:
    mass = _shards.mass(operands, config)
    return jnp.where(has_law(mass.top, mass.total), mass.argmax, -1)


@follows_shardings
def greedy(h: ArrayLike, w: ArrayLike, *, valid_vocab: int | None = None, logit_bias: ArrayLike | None = None,
           mask: ArrayLike | None = None, processors: Processors | None = None, vocab_axis: int = 0,
           scale: float | None = None, soft_cap: float | None = None, precision: str | jax.lax.Precision | None = None,
           implementation: str | Tuning | None = None,
           axis_name: str | tuple[str, ...] | None = None) -> Array:
    """The most probable token of every row, `argmax(h @ w.T + logit_bias)`; equal logits go to the lowest id.

    Pathwise exact; `sample` at temperature 0.

    Args: as `sample`.

    Returns:
      int32 tokens `[*batch]`; -1 for a row that has no law.

    >>> import jax.numpy as jnp, gumbeljax
    >>> int(gumbeljax.greedy(jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])))
    1
    """
    operands, config, batch_shape = prepare(
        h, w, valid_vocab=valid_vocab, logit_bias=logit_bias, mask=mask, processors=processors, vocab_axis=vocab_axis,
        scale=scale, soft_cap=soft_cap, precision=precision, implementation=implementation, axis_name=axis_name)
    if operands.h.shape[0] == 0:
        return jnp.zeros(batch_shape, jnp.int32)
    with plain_broadcasting():
        return _greedy(operands, config=config).reshape(batch_shape)
