"""From a user's arguments to checked operands and one static description of the call, shared by every entry point."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _checks, _implementation
from gumbeljax._typing import Array
from pallas_kernels.logits import Elementwise, canonical_temperature


def plain_broadcasting():
    """Users may forbid rank promotion in their own code; ours broadcasts per-row numbers over the vocabulary."""
    return jax.numpy_rank_promotion("allow")


class Config(NamedTuple):
    """What is fixed when a call is traced. Hashable: equal configs share one compiled function."""

    implementation: str
    device: _implementation.DeviceFacts
    vocab: int
    vocab_axis: int
    scale: float | None
    soft_cap: float | None
    precision: jax.lax.Precision | None

    def stages(self) -> _implementation.Stages:
        """Stage 1 of the chosen implementation."""
        return _implementation.stages(self.implementation, self.device)

    def shape_arguments(self) -> dict:
        """What every stage 1 needs to know about the table."""
        return {"vocab": self.vocab, "vocab_axis": self.vocab_axis, "precision": self.precision}


class Operands(NamedTuple):
    """What varies from call to call."""

    h: Array  # [rows, d_model], or logits [rows, vocab] when w is None
    w: Array | None
    t: Array  # f32 [rows]
    bias: Array | None
    mask: Array | None

    def options(self, config: Config) -> Elementwise:
        return Elementwise(config.scale, config.soft_cap, self.bias, self.mask)


def prepare(h, w, *, temperature=1.0, valid_vocab=None, logit_bias=None, mask=None, vocab_axis=0, scale=None,
            soft_cap=None, precision=None, implementation=None, groups=False) -> tuple[Operands, Config, tuple[int, ...]]:
    """Checks the arguments common to all entry points; the last result is the batch shape. `groups`: the call will need
    the masses of all groups."""
    head, device = _checks.head(h, w, vocab_axis, valid_vocab), _implementation.device_facts(h)
    name = _implementation.choose(head.h, head.w, implementation, device, vocab_axis=head.vocab_axis,
                                  options=Elementwise(bias=logit_bias, mask=mask), groups=groups)
    config = Config(
        name, device, head.vocab, head.vocab_axis, _checks.constant(scale, "scale"),
        _checks.constant(soft_cap, "soft_cap", positive=True), _implementation.precision_of(precision, head.h.dtype))
    t = canonical_temperature(_checks.temperature(temperature, head.batch_shape))
    width = head.w.shape[head.vocab_axis]
    bias = _checks.per_token(logit_bias, "logit_bias", head.batch_shape, width, head.vocab, jnp.float32)
    mask = _checks.per_token(mask, "mask", head.batch_shape, width, head.vocab, jnp.bool_)
    return Operands(head.h, head.w, t, bias, mask), config, head.batch_shape


def prepare_logits(logits, *, temperature=1.0, valid_vocab=None, logit_bias=None, mask=None):
    """As `prepare` for logits that exist already."""
    logits = _checks.float_array(logits, "logits")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [*batch, vocab] with at least one token; got shape {list(logits.shape)}.")
    batch_shape, width = logits.shape[:-1], logits.shape[-1]
    vocab = _checks.vocabulary(valid_vocab, width)
    config = Config("xla", _implementation.device_facts(logits), vocab, 0, None, None, None)
    t = canonical_temperature(_checks.temperature(temperature, batch_shape))
    bias = _checks.per_token(logit_bias, "logit_bias", batch_shape, width, vocab, jnp.float32)
    mask = _checks.per_token(mask, "mask", batch_shape, width, vocab, jnp.bool_)
    return Operands(logits.reshape(t.shape[0], width), None, t, bias, mask), config, batch_shape
