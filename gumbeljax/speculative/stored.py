"""Laws under filters: their logits exist, for a few requests at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from gumbeljax import _mesh, _shards
from gumbeljax._call import Config, Operands
from gumbeljax._typing import Array
from gumbeljax.speculative import coupled, leviathan
from pallas_kernels import filtered
from pallas_kernels.kept_set import kept_set
from pallas_kernels.logits import DENSE

LOGITS = 2**26  # of both laws alive at a time, unless one request has more


def _stored(operands: Operands, config: Config) -> tuple[Operands, Config]:
    """The law as logits, or a shard's part of them: -inf outside the kept set."""
    axes = config.axis_name
    local = _mesh.vary(operands, axes) if axes else operands
    if axes and operands.filters is not None:
        x = _shards.kept_logits(operands, local, config, with_total=False)[1]
    else:
        x = filtered.all_logits(local.h, local.w, local.options(config), **config.shape_arguments())[1]
        if operands.filters is not None:
            x = jnp.where(kept_set(x, operands.t, operands.filters), x, -jnp.inf)
    plain = Config("xla", config.device, config.vocab, 0, None, None, None, axes, all_vocab=config.all_vocab)
    return Operands(x.T, None, operands.t, None, None, None, None, None), plain


def _split(x: Array, requests: int, chunk: int) -> Array:
    """Rows `[requests * k, ...]` as `[chunks, chunk * k, ...]`; the last chunk is filled up with the first requests."""
    x = x.reshape(requests, x.shape[0] // requests, *x.shape[1:])  # without -1: a draft may have no tokens
    x = jnp.concatenate([x, x[jnp.arange(-requests % chunk) % requests]])
    return x.reshape(x.shape[0] // chunk, chunk * x.shape[1], *x.shape[2:])


def _apart(operands: Operands) -> tuple[Operands, dict[str, Any]]:
    """The operands without what all rows share, and that."""
    fields = operands._asdict()
    once = {"w", "valid", *(name for name in DENSE if fields[name] is not None and fields[name].ndim == 1)}
    return operands._replace(**dict.fromkeys(once)), {name: fields[name] for name in once}


def in_chunks(function, laws: list[tuple[Operands, Config]], requests: int, *arrays):
    """`function(laws, *arrays)` on the filtered laws as logits, a few requests at a time; arrays have rows by request."""
    rows = sum(operands.h.shape[0] for operands, _ in laws)
    chunk = max(1, min(requests, LOGITS * requests // (rows * laws[0][1].vocab)))
    own, shared = zip(*(_apart(operands) for operands, _ in laws), strict=True)

    def one(part):
        own, arrays = part
        stored = [_stored(x._replace(**same), config) for x, same, (_, config) in zip(own, shared, laws, strict=True)]
        return function(stored, *arrays)

    out = jax.lax.map(one, jax.tree.map(lambda x: _split(x, requests, chunk), (own, arrays)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:requests], out)


@functools.partial(jax.jit, static_argnames=("target_config", "draft_config"))
def verify_drafts(target: Operands, draft: Operands | None, tokens, lens, keys, *, target_config: Config,
                  draft_config: Config | None) -> leviathan.Outcome:
    """`leviathan.verify_drafts` where a law has filters."""
    def function(laws, tokens, lens, key0, key1):
        (p, p_config), (q, q_config) = laws[0], laws[1] if len(laws) > 1 else (None, None)
        return leviathan.verify_drafts(p, q, tokens, lens, (key0, key1), target_config=p_config, draft_config=q_config)

    laws = [(target, target_config)]
    if draft is not None and draft_config is not None:
        laws.append((draft, draft_config))
    return in_chunks(function, laws, tokens.shape[0], tokens, lens, *keys)


@functools.partial(jax.jit, static_argnames="config")
def verify_coupled_drafts(target: Operands, tokens, lens, keys, *, config: Config):
    """`coupled.verify_drafts` where the target has filters."""
    def function(laws, tokens, lens, key0, key1):
        (p, p_config), = laws
        return coupled.verify_drafts(p, tokens, lens, (key0, key1), config=p_config)

    return in_chunks(function, [(target, config)], tokens.shape[0], tokens, lens, *keys)
