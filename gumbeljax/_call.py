"""From a user's arguments to checked operands and one static description of the call, shared by every entry point."""

import contextlib
import inspect
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _checks, _implementation, _mesh, processing
from gumbeljax._tuning import Tiles, Tuning
from gumbeljax._typing import Array, ArrayLike
from pallas_kernels import kept
from pallas_kernels.kept import Filters
from pallas_kernels.logits import Elementwise, canonical_temperature


@contextlib.contextmanager
def plain_broadcasting():
    """Users may forbid rank and dtype promotion in their own code; ours broadcasts per-row numbers over the vocabulary."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class Config(NamedTuple):
    """What is fixed when a call is traced. Hashable: equal configs share one compiled function."""

    implementation: str
    device: _implementation.DeviceFacts
    vocab: int
    vocab_axis: int
    scale: float | None
    soft_cap: float | None
    precision: jax.lax.Precision | None
    axis_name: tuple[str, ...] = ()  # mesh axes that cut the vocabulary; `vocab` is then that of one shard
    tiles: Tiles | None = None  # None: those of the implementation's rule
    all_vocab: int | None = None  # tokens of all shards that are no padding; None where there are no shards
    one_temperature: bool = False  # known to be the same number for all rows; of use to kernels only

    def stages(self) -> _implementation.Stages:
        """Stage 1 of the chosen implementation."""
        return _implementation.stages(self.implementation, self.device, self.tiles, one_temperature=self.one_temperature)

    def shape_arguments(self) -> dict:
        """What every stage 1 needs to know about the table."""
        return {"vocab": self.vocab, "vocab_axis": self.vocab_axis, "precision": self.precision}


class Operands(NamedTuple):
    """What varies from call to call."""

    h: Array  # [rows, d_model], or logits [rows, vocab] when w is None
    w: Array | None
    t: Array  # f32 [rows]
    bias: Array | None  # this and the next three: [vocab] or [rows, vocab]
    mask: Array | None
    factor: Array | None
    offset: Array | None
    filters: Filters | None
    weight_scale: Array | None = None  # f32 [vocab] of a quantised w
    valid: Array | None = None  # i32: ids of this shard that are not padding, or None when all are real

    def dense(self):
        return self.bias, self.mask, self.factor, self.offset

    def options(self, config: Config) -> Elementwise:
        return Elementwise(config.scale, config.soft_cap, *self.dense(), self.valid, self.weight_scale)


def _operands(h, w, batch_shape, width, vocab, *, temperature, top_k, top_p, min_p, logit_bias, mask, processors) -> Operands:
    """What both kinds of call check in the same way. A traced number that breaks its rule makes the row's temperature NaN, so
    that the row has no law on any route."""
    bias = _checks.per_token(logit_bias, "logit_bias", batch_shape, width, vocab, jnp.float32)
    mask = _checks.per_token(mask, "mask", batch_shape, width, vocab, jnp.bool_)
    dense = processing.dense(processors, bias, mask, batch_shape, width, vocab)
    filters, is_good = processing.filters(top_k, top_p, min_p, batch_shape)
    if filters is not None and filters.top_p is not None and vocab > kept.MAX_VOCAB:
        raise ValueError(f"top_p must be None for more than {kept.MAX_VOCAB} tokens, whose masses it could not add up exactly; "
                         f"got {vocab}: use top_k or min_p.")
    t = canonical_temperature(_checks.temperature(temperature, batch_shape))
    if (is_good := is_good & dense.is_good) is not True:
        t = jnp.where(is_good, t, jnp.nan)
    return Operands(h, w, t, dense.bias, dense.mask, dense.factor, dense.offset, filters)


@plain_broadcasting()
def prepare(h, w, *, temperature=1.0, top_k=None, top_p=None, min_p=None, valid_vocab=None, logit_bias=None, mask=None,
            processors=None, vocab_axis=0, scale=None, soft_cap=None, precision=None, implementation=None, axis_name=None,
            groups=False, one_draw=False) -> tuple[Operands, Config, tuple[int, ...]]:
    """Checks the arguments common to all entry points; the last result is the batch shape. `groups`: the call will need
    the masses of all groups. `one_draw`: it draws one token per row."""
    axes = _mesh.vocabulary_axes(axis_name, _checks.table_of(w), h=h, temperature=temperature, top_k=top_k, top_p=top_p,
                                 min_p=min_p)
    head, device = _checks.head(h, w, vocab_axis, None if axes else valid_vocab), _implementation.device_facts(h)
    valid, vocab = None, None
    if axes:
        width, first = head.vocab * _mesh.num_shards(axes), _mesh.first_id(axes, head.vocab)
        vocab = _checks.vocabulary(valid_vocab, width)
        valid = None if vocab == width else jnp.clip(vocab - first, 0, head.vocab)
        if isinstance(logit_bias, Mapping):
            dense = _checks.dense_bias(logit_bias, "logit_bias", width, vocab)
            logit_bias = jax.lax.dynamic_slice_in_dim(dense, first, head.vocab)
        processors = processing.of_shard(processors, first, vocab, head.batch_shape)
    operands = _operands(head.h, head.w, head.batch_shape, head.w.shape[head.vocab_axis], head.vocab, temperature=temperature,
                         top_k=top_k, top_p=top_p, min_p=min_p, logit_bias=logit_bias, mask=mask, processors=processors)
    operands = operands._replace(valid=valid, weight_scale=head.weight_scale)
    name, tiles = _implementation.plan(
        head.h, head.w, implementation, device, vocab_axis=head.vocab_axis,
        options=Elementwise(None, None, *operands.dense(), valid), groups=groups, filters=operands.filters is not None,
        one_draw=one_draw and not axes)
    # A traced filter or penalty that breaks its rule takes the temperature of its row away.
    is_one = _checks.as_array(temperature, "temperature").ndim == 0
    one_temperature = is_one and name != "xla" and operands.filters is None and processors is None
    config = Config(
        name, device, head.vocab, head.vocab_axis, _checks.constant(scale, "scale"),
        _checks.constant(soft_cap, "soft_cap", positive=True), _implementation.precision_of(precision, head.h.dtype), axes,
        tiles, vocab, one_temperature)
    return operands, config, head.batch_shape


@plain_broadcasting()
def prepare_logits(logits, *, temperature=1.0, top_k=None, top_p=None, min_p=None, valid_vocab=None, logit_bias=None, mask=None,
                   processors=None):
    """As `prepare` for logits that exist already."""
    logits = _checks.float_array(logits, "logits")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [*batch, vocab] with at least one token; got shape {list(logits.shape)}: "
                         "put the vocabulary on the last axis.")
    if axes := _mesh.explicit_axes(logits, -1):
        raise ValueError(f"logits must be whole along the vocabulary; got some that are cut over {_mesh.quoted(axes)} there: "
                         "gather them with jax.reshard.")
    batch_shape, width = logits.shape[:-1], logits.shape[-1]
    vocab = _checks.vocabulary(valid_vocab, width)
    config = Config("xla", _implementation.device_facts(logits), vocab, 0, None, None, None)
    rows = math.prod(batch_shape)
    operands = _operands(logits.reshape(rows, width), None, batch_shape, width, vocab, temperature=temperature, top_k=top_k,
                         top_p=top_p, min_p=min_p, logit_bias=logit_bias, mask=mask, processors=processors)
    return operands, config, batch_shape


def check_names(options: Mapping, where: str) -> None:
    """Options are those of `prepare` that users know; a wrong one is told by the function they called."""
    known = sorted(set(inspect.signature(prepare).parameters) - {"h", "w", "groups", "one_draw"})
    for name in options:
        if name not in known:
            raise TypeError(f"{where} takes the options {', '.join(known)}; got {name}: leave it out.")


def choose_implementation(h: ArrayLike, w: ArrayLike, implementation: str | Tuning | None = None, *,
                          num_samples: int | None = None, **options) -> str:
    """The implementation that `sample(h, w, key, ...)` runs with these arguments: "xla", "triton" or "mosaic".

    None chooses: what was measured to be fastest for this shape and device, where the package has a measurement; else, by
    rule, on an NVIDIA GPU "mosaic" where it can run (Hopper, one token per row, 16-bit floats, no `logit_bias`, `mask`,
    `processors` or filters; a `w` of 8 bits from 17 rows on), else "triton" where that can; "xla" everywhere else. A named one
    is returned if it can run here.

    Args:
      h, w, implementation, num_samples, options: as `sample`.

    Raises:
      ValueError, TypeError: an argument breaks its rule.
      NotImplementedError: the named implementation cannot run this call.

    >>> import jax.numpy as jnp, gumbeljax
    >>> gumbeljax.choose_implementation(jnp.ones(16), jnp.ones((32, 16)), "xla")
    'xla'
    """
    several = num_samples is not None
    if options.get("method") == "categorical" and not isinstance(implementation, str):
        return "xla"
    options = {name: x for name, x in options.items() if name not in ("method", "mode", "replace", "row_offset")}
    check_names(options, "choose_implementation")
    return prepare(h, w, implementation=implementation, groups=several, one_draw=not several, **options)[1].implementation
