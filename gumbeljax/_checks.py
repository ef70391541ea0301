"""Bad input gets one sentence at trace time: the argument, the rule, what was got, the fix."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gumbeljax._typing import Array

FLOATS, EIGHT_BITS = ("bfloat16", "float16", "float32"), ("int8", "float8_e4m3fn")


class Head(NamedTuple):
    """Checked operands: h `[rows, d_model]`, w as given (without its scales), and what their shapes say."""

    h: Array
    w: Array
    weight_scale: Array | None  # f32 [vocab] of a quantised w
    batch_shape: tuple[int, ...]
    num_rows: int
    vocab: int  # ids below this exist; the table may be longer
    vocab_axis: int


def shape_of(x) -> list[int]:
    """The shape as the messages print it."""
    return list(np.shape(x))


def is_traced(x) -> bool:
    """Whether values cannot be looked at now."""
    return isinstance(x, Tracer)


def is_concrete(x) -> bool:
    """Whether values can be looked at now: not a tracer (and None has none)."""
    return x is not None and not is_traced(x)


def as_array(x, name: str) -> Array:
    """An array, or one sentence."""
    try:
        return jnp.asarray(x)
    except OverflowError:
        raise ValueError(f"{name} must fit in 32 bits; got {str(x)[:40]}: pass an array or a number of 32 bits.") from None
    except (TypeError, ValueError):
        kind = f" of dtype {x.dtype}, which jax does not have" if hasattr(x, "dtype") else ""
        raise TypeError(f"{name} must be an array or a number; got {type(x).__name__}{kind}: pass "
                        f"{f'{name}.astype(np.float32)' if kind else 'a jax or numpy array'}.") from None


def float_array(x, name: str) -> Array:
    """A bfloat16, float16 or float32 array. float64 becomes float32; anything else is refused."""
    x = as_array(x, name)
    if x.dtype == jnp.float64:
        x = x.astype(jnp.float32)
    if x.dtype.name not in FLOATS:
        other = ", or pass gumbeljax.QuantizedHead(w, scale)" if name == "w" and x.dtype.name in EIGHT_BITS else ""
        raise TypeError(f"{name} must be {', '.join(FLOATS[:-1])} or {FLOATS[-1]}; got {x.dtype}: "
                        f"cast it with {name}.astype(jnp.float32){other}.")
    return x


def is_quantized(w) -> bool:
    """Whether w is a `QuantizedHead`, or looks like one."""
    return hasattr(w, "qvalue") and hasattr(w, "scale")


def table_of(w):
    """The array whose shape, and way over a mesh, is that of w."""
    return w.qvalue if is_quantized(w) else w


def quantized_table(w, vocab_axis: int) -> tuple[Array, Array]:
    """Checked (table, scales f32 `[vocab]`) of a quantised w, constants to differentiation."""
    q = as_array(w.qvalue, "w.qvalue")
    if q.dtype.name not in EIGHT_BITS:
        raise TypeError(f"w.qvalue must be {' or '.join(EIGHT_BITS)}; got {q.dtype}: make w with gumbeljax.quantize_head.")
    if q.ndim != 2:
        raise ValueError(f"w.qvalue must be [vocab, d_model]; got shape {shape_of(q)}: pass the two-dimensional output table.")
    if vocab_axis % 2:
        raise ValueError(f"vocab_axis must be 0 for a quantised w, which is stored as [vocab, d_model]; got {vocab_axis}: "
                         "quantise w.T.")
    if getattr(w, "zero_point", None) is not None:
        raise ValueError("w.zero_point must be None; got one: quantise w symmetrically, as gumbeljax.quantize_head does.")
    scale, vocab = float_array(w.scale, "w.scale").astype(jnp.float32), q.shape[0]
    if scale.shape not in ((vocab,), (vocab, 1)):
        raise ValueError(f"w.scale must be [{vocab}] or [{vocab}, 1], one number for each token of w.qvalue {shape_of(q)}; got "
                         f"{shape_of(scale)}: make w with gumbeljax.quantize_head.")
    return jax.lax.stop_gradient((q, scale.reshape(vocab)))


def head(h, w, vocab_axis: int, valid_vocab: int | None) -> Head:
    """Checks h `[*batch, d_model]` against w `[vocab, d_model]`, or `[d_model, vocab]` with `vocab_axis=1`."""
    h, scale = float_array(h, "h"), None
    w = w if is_quantized(w) else float_array(w, "w")
    if isinstance(vocab_axis, bool) or not isinstance(vocab_axis, int) or vocab_axis not in (0, 1, -1, -2):
        raise ValueError(f"vocab_axis must be 0 for w [vocab, d_model] or 1 for w [d_model, vocab]; got "
                         f"{vocab_axis!r}: pass the number.")
    if is_quantized(w):
        w, scale = quantized_table(w, vocab_axis)
    vocab_axis %= 2
    if w.ndim != 2:
        raise ValueError(f"w must be [vocab, d_model]; got shape {shape_of(w)}: pass the two-dimensional output table.")
    if h.ndim == 0:
        raise ValueError("h must be [*batch, d_model]; got a scalar: pass the hidden states.")
    d_model, vocab = w.shape[1 - vocab_axis], w.shape[vocab_axis]
    if h.shape[-1] != d_model:
        layout = "[vocab, d_model]" if vocab_axis == 0 else "[d_model, vocab]"
        raise ValueError(f"h must end in d_model = {d_model}, that of w {shape_of(w)} read as {layout}; got h "
                         f"{shape_of(h)}: for a w of the other layout pass vocab_axis={1 - vocab_axis}.")
    if d_model == 0 or vocab == 0:
        raise ValueError(f"w must have at least one token and one coordinate; got shape {shape_of(w)}: "
                         "pass the output table.")
    # A wider dtype wins, so that neither operand is rounded; w is widened block by block, never as a whole.
    h = h if scale is not None else h.astype(jnp.promote_types(h.dtype, w.dtype))
    batch_shape = h.shape[:-1]
    num_rows = math.prod(batch_shape)
    valid = vocabulary(valid_vocab, vocab)
    return Head(h.reshape(num_rows, d_model), w, None if scale is None else scale[:valid], batch_shape, num_rows, valid,
                vocab_axis)


def vocabulary(valid_vocab: int | None, vocab: int) -> int:
    """The number of real tokens."""
    if valid_vocab is None:
        return vocab
    if isinstance(valid_vocab, bool) or not isinstance(valid_vocab, int | np.integer):
        raise TypeError(f"valid_vocab must be a Python int; got {type(valid_vocab).__name__}: "
                        "it sets shapes, so it cannot be traced.")
    if not 0 < valid_vocab <= vocab:
        raise ValueError(f"valid_vocab must be between 1 and the vocabulary of w, {vocab}; got {valid_vocab}: "
                         "pass the number of real tokens.")
    return int(valid_vocab)


def in_32_bits(x) -> Any:
    """Wide integers of Python and NumPy, at the ends of int32 where they leave it: jax would refuse or wrap them."""
    if isinstance(x, int) and not isinstance(x, bool):
        return min(max(x, -(2**31)), 2**31 - 1)
    if isinstance(x, np.ndarray | np.generic) and x.dtype in (np.int64, np.uint64):
        x = np.minimum(x, 2**31 - 1)
        return (np.maximum(x, -(2**31)) if x.dtype == np.int64 else x).astype(np.int32)
    return x


def per_row(x, name: str, batch_shape: tuple[int, ...], dtype=jnp.float32) -> Array:
    """A scalar, or one number per row, as float32 (or int32, where wider integers are clipped) `[rows]`."""
    if isinstance(x, str) or x is None:
        raise TypeError(f"{name} must be a number or an array of shape {list(batch_shape)}; got {x!r}: pass a number.")
    if getattr(x, "dtype", None) in (np.int64, np.uint64) and isinstance(x, np.ndarray | np.generic):  # jax would cut them
        x = x.astype(np.float32) if dtype == jnp.float32 else in_32_bits(x)
    x = as_array(x, name)
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{name} must be real; got dtype {x.dtype}: cast it to float32.")
    if x.shape not in ((), batch_shape):
        fix = f"reshape it to {list(batch_shape)}" if x.size == math.prod(batch_shape) else "give every row its own"
        raise ValueError(f"{name} must be a scalar or have the batch's shape {list(batch_shape)}; got {list(x.shape)}: {fix}.")
    if dtype == jnp.int32 and x.dtype != jnp.int32:
        x = jnp.clip(x, 0 if x.dtype.kind == "u" else -1, 2**31 - 1) if x.dtype.itemsize >= 4 else x
    return jnp.broadcast_to(x.astype(dtype), batch_shape).reshape(-1)


def temperature(x, batch_shape: tuple[int, ...]) -> Array:
    """Checked temperatures `[rows]`: concrete values must be finite and not negative, traced ones are marked later."""
    with np.errstate(over="ignore"):  # what leaves float32 is refused below
        out = per_row(x, "temperature", batch_shape)
        given = np.zeros(0) if any(map(is_traced, jax.tree.leaves(x))) else np.asarray(x, np.float64).reshape(-1)
        values = given.astype(np.float32)
    if np.any(bad := ~((given >= 0) & np.isfinite(values))):
        raise ValueError(f"temperature must be finite and at least 0 (0 is greedy); got {shown(given[bad][0])}: "
                         "pass a float32 number that is not negative.")
    return out


def per_token(x, name: str, batch_shape: tuple[int, ...], width: int, vocab: int, dtype) -> Array | None:
    """An option over the vocabulary: `[vocab]` or `[*batch, vocab]`, as `[vocab]` or `[rows, vocab]` cut to real ids."""
    if x is None:
        return None
    if isinstance(x, Mapping) and dtype == jnp.float32:
        x = dense_bias(x, name, width, vocab)
    x = as_array(checked_mask(x, name) if dtype == jnp.bool_ else x, name)
    if dtype == jnp.bool_ and x.dtype != jnp.bool_:
        return unpacked_bits(x, name, batch_shape, width)[..., :vocab]
    if dtype == jnp.float32:
        x = float_array(x, name).astype(jnp.float32)
    if x.ndim == 0 or x.shape[-1] != width:
        raise ValueError(f"{name} must be as wide as the vocabulary of w, {width}; got width "
                         f"{x.shape[-1] if x.ndim else 'none (a scalar)'}: pad it to {width}.")
    if x.shape not in ((width,), (*batch_shape, width)):
        raise ValueError(f"{name} must be {[width]} or {[*batch_shape, width]}; got {list(x.shape)}: "
                         "give every row its own, or all the same.")
    return x.reshape(-1, width)[:, :vocab] if x.ndim > 1 else x[:vocab]


def checked_mask(x: Any, name: str) -> Any:
    """A mask, bool or packed in words of 32 bits; lists as an array."""
    if isinstance(x, list | tuple):
        return checked_mask(listed(x, name), name)
    x = x if hasattr(x, "dtype") else as_array(x, name)
    if x.dtype not in (jnp.bool_, jnp.uint32, jnp.int32):  # of 64 bits jax would cut half off
        packed = f", or np.asarray({name}, np.uint32) for packed bits" if x.dtype in (np.int64, np.uint64) else ""
        raise TypeError(f"{name} must be boolean, True for allowed tokens, or packed bits in uint32; got dtype {x.dtype}: "
                        f"write {name} != 0{packed}.")
    return x


def shown(x) -> str:
    """A number with no more digits than tell it apart.

    >>> shown(2.0), shown(1.0000001)
    ('2', '1.0000001')
    """
    return f"{x:g}" if float(f"{x:g}") == x or x != x else repr(float(x))


def unpacked_bits(x, name: str, batch_shape: tuple[int, ...], width: int) -> Array:
    """A mask packed 32 tokens to a word, token i in bit i % 32 of word i // 32, as bool `[width]` or `[rows, width]`."""
    words = -(-width // 32)
    if x.shape not in ((words,), (*batch_shape, words)):
        raise ValueError(f"{name} of packed bits must be {[words]} or {[*batch_shape, words]}, one bit for each of the {width} "
                         f"tokens of w; got {list(x.shape)}: pad it to {words} words, or, if it is one number a token, write "
                         f"{name} != 0.")
    with jax.numpy_rank_promotion("allow"):
        bits = (x[..., None] >> jnp.arange(32, dtype=x.dtype)) & 1
    bits = (bits != 0).reshape(*x.shape[:-1], 32 * words)[..., :width]
    return bits if x.ndim == 1 else bits.reshape(-1, width)


def dense_bias(x: Mapping, name: str, width: int, vocab: int) -> Array:
    """`{token id: bias}` as a dense `[width]` array."""
    for token in x:
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab:
            raise ValueError(f"{name} must name token ids from 0 to {vocab - 1}; got {token!r}: leave it out.")
    ids = jnp.asarray(list(x), jnp.int32)
    values = [as_array(v, f"{name}[{token}]") for token, v in x.items()]
    for token, v in zip(x, values, strict=True):
        if v.shape != () or not jnp.issubdtype(v.dtype, jnp.number):
            raise TypeError(f"{name}[{token}] must be a number; got {v.dtype}{list(v.shape)}: pass one float for each id.")
    values = jnp.stack([v.astype(jnp.float32) for v in values]) if values else jnp.zeros(0, jnp.float32)
    return jnp.zeros(width, jnp.float32).at[ids].set(values)


def constant(x, name: str, positive: bool = False) -> float | None:
    """A model constant such as `soft_cap`: a finite Python number, static."""
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, int | float | np.floating | np.integer):
        raise TypeError(f"{name} must be a Python number, fixed when the call is traced; got {type(x).__name__}: "
                        f"pass float({name}).")
    with np.errstate(all="ignore"):
        small = np.float32(min(max(x, -(2**200)), 2**200))  # as the kernels see it; Python ints have no end
        usable = np.isfinite(small) and not (positive and not (small > 0 and np.isfinite(1 / small)))
    if not usable:
        raise ValueError(f"{name} must be finite{' and positive' if positive else ''}; got {str(x)[:40]}: "
                         "pass a float32 number, or None for none.")
    return float(x)


def choice(x, name: str, allowed: tuple) -> None:
    """One of a few names."""
    if not (x is None or isinstance(x, str)) or x not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {x!r}: pass one of these.")


def count(x, name: str, fix: str = "pass a larger one") -> int:
    """A positive Python int."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name} must be a Python int, since it sets the shape of the result; got {type(x).__name__}: "
                        "make it a constant.")
    if x < 1:
        raise ValueError(f"{name} must be at least 1; got {x}: {fix}.")
    return int(x)


def listed(x, name: str):
    """An array, or lists as one of NumPy, which keeps 64 bits; of JAX where a list holds tracers."""
    if hasattr(x, "dtype"):
        return x
    try:
        x = jnp.asarray(x) if any(map(is_traced, jax.tree.leaves(x))) else np.asarray(x)
    except ValueError:
        raise ValueError(f"{name} must be lists of one length; got lists of several: fill shorter ones up with -1.") from None
    return x.astype(np.int32) if x.size == 0 else x  # an empty list has no dtype


def is_integral(x) -> bool:
    """Whether what `listed` returned holds integers."""
    return x.dtype != object and jnp.issubdtype(x.dtype, jnp.integer)


def as_ids(x: Any) -> Array:
    """Integers as int32: bounds beside narrower ones would wrap around, and wider ones must not wrap into a vocabulary."""
    if x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
        xp: Any = np if isinstance(x, np.ndarray | np.generic) else jnp
        x = xp.clip(x, 0 if x.dtype.kind == "u" else -1, 2**31 - 1)
    return jnp.asarray(x).astype(jnp.int32)


def token_ids(tokens, batch_shape: tuple[int, ...], name: str = "tokens") -> Array:
    """Integer tokens of the batch's shape, as int32 `[rows]`."""
    tokens = listed(tokens, name)
    if not is_integral(tokens):
        raise TypeError(f"{name} must be integers; got dtype {tokens.dtype}: cast them to int32.")
    if tokens.shape != batch_shape:
        raise ValueError(f"{name} must have the batch's shape {list(batch_shape)}; got {list(tokens.shape)}: reshape them.")
    return as_ids(tokens).reshape(-1)
