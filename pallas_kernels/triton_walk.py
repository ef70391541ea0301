"""Verification of one chain a request behind its passes over the tables, on NVIDIA GPUs, through Pallas' Triton backend.

Three launches: the walk along the drafted tokens, a program a request; the search for what replaces a rejected one
(`triton_search`); and what comes of both. XLA takes a dozen for it, of a microsecond of work each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import dual, finish, noise, race, search
from pallas_kernels.logits import Elementwise, model_logits, processed_logits
from pallas_kernels.triton_finish import like, widened
from pallas_kernels.triton_search import LEAST, arguments_of, law_of_rows, search_shares

ENTRIES = 2**14  # of a table that a program reads at a time


def products(plt, h_ref, w_ref, rows, ids, zero, *, d_model, vocab_axis):
    """Raw logits of one token `ids` of each row, `[n]`."""
    chunk = min(pl.next_power_of_2(d_model), max(16, ENTRIES // ids.shape[0]))
    total = jnp.zeros(ids.shape, jnp.float32)
    for start in range(0, d_model, chunk):  # unrolled: all loads are in flight together
        dims = (zero + start + lax.broadcasted_iota(jnp.int32, (chunk,), 0))[None, :]
        exists = jnp.broadcast_to(dims < d_model, (*ids.shape, chunk))
        at = (ids[:, None], dims) if vocab_axis == 0 else (dims, ids[:, None])
        w = plt.load(w_ref.at[at], mask=exists, other=0.0)
        h = plt.load(h_ref.at[rows[:, None], dims], mask=exists, other=0.0)
        total += jnp.sum(widened(w, h.dtype).astype(jnp.float32) * h.astype(jnp.float32), axis=1)
    return total


def walk_kernel(
    *refs,  # of each law what `arguments_of` lists; drafted tokens i32 [requests * draft_len] (their number i32 [requests]);
    # outputs: accepted tokens, rows of both laws, factor, leader [requests]; log p of the drafted tokens [requests * draft_len]
    structure, laws, plt, vocab, draft_len,
):
    """What one program does: a request."""
    num_inputs = structure.num_leaves
    target, draft, tokens_ref, lens_ref = jax.tree.unflatten(structure, refs[:num_inputs])
    *stop_refs, log_p_ref = refs[num_inputs:]
    request = pl.program_id(0)
    zero = request - request  # a start that is not a constant: JAX refuses slices that it can see to end out of bounds
    place = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(draft_len),), 0)
    exists, first_p, first_q = place < draft_len, request * (draft_len + 1), request * draft_len
    token = plt.load(tokens_ref.at[first_q + place], mask=exists, other=-1)
    ids = jnp.clip(token, 0, vocab - 1)

    def read(refs, law, first, num_keys):
        """(log-probabilities of the drafted tokens, whether there is a law, keys)."""
        rows = first + jnp.minimum(place, draft_len - 1)
        t, keys, known = law_of_rows(plt, refs, rows, zero, num_keys)
        is_law, side = dual.is_law(known), dual.Side(refs["h"], None, t, Elementwise(), known)
        if refs["h"] is None:
            return dual.log_law(None, ids, side), is_law, keys
        raw = products(plt, refs["h"], refs["w"], rows, ids, zero, d_model=law["d_model"], vocab_axis=law["vocab_axis"])
        options = {name: plt.load(ref.at[ids] if len(ref.shape) == 1 else ref.at[rows, ids])
                   for name, ref in zip(law["dense"], refs["dense"], strict=True)}
        own = Elementwise(**{name: x != 0 if x.dtype == jnp.int8 else x for name, x in options.items()})
        x = processed_logits(model_logits(raw, law["scale"], law["soft_cap"], own.weight_scale), own)
        return dual.log_law(x, ids, side), is_law, keys

    log_p, has_p, keys = read(target, laws[0], first_p, 2)
    log_q, has_q, _ = read(draft, laws[1], first_q, 0)
    is_real = (token >= 0) & (token < vocab) & has_p & has_q & exists
    if lens_ref is not None:
        is_real &= place < plt.load(lens_ref.at[request])
    ratio = log_p - log_q  # NaN where p and q are 0: not accepted
    is_accepted = is_real & (noise.log_coin(keys[0], keys[1], 0) < ratio)
    num_proposed, position = (jnp.min(jnp.where(x, draft_len, place)) for x in (is_real, is_accepted))
    num_proposed, position = jnp.minimum(num_proposed, draft_len), jnp.minimum(position, draft_len)
    row = first_p + position
    t = lax.bitcast_convert_type(plt.load(target["vectors"].at[zero, row]), jnp.float32)
    # Greedy rows have one token to be drawn, whatever q says of it.
    again = (position < num_proposed) & (t != 0.0) & (plt.load(target["normalizer"].token.at[row]) >= 0)
    stop = (position, row, first_q + jnp.minimum(position, draft_len - 1), again.astype(jnp.float32), jnp.int32(LEAST))
    for ref, value in zip(stop_refs, stop, strict=True):
        plt.store(ref.at[request], value)
    plt.store(log_p_ref.at[first_q + place], log_p, mask=exists)


def end_kernel(
    position_ref, row_ref, factor_ref,  # [requests]
    token_ref, known_ref,  # drawn from p, and its log p [rows]
    tokens_ref, log_p_ref,  # drafted, and their log p [requests * draft_len]
    *refs,  # what searches found [shares, requests]; outputs: tokens, their log p [requests * (draft_len + 1)]
    plt, shares, draft_len,
):
    """What one program does: the tokens of a request."""
    *found_refs, out_ref, log_out_ref = refs
    request = pl.program_id(0)
    share = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(shares),), 0)
    empties = -jnp.inf, 0.0, race.NO_ID, -jnp.inf, 0.0
    high, low, found, log_p, mass = (plt.load(ref.at[share, request], mask=share < shares, other=other)
                                     for ref, other in zip(found_refs, empties, strict=True))
    best = race.best_score(high, low, found)[2]
    again = (plt.load(factor_ref.at[request]) > 0.0) & (jnp.sum(mass) > search.NEGLIGIBLE)
    position, row = plt.load(position_ref.at[request]), plt.load(row_ref.at[request])
    last = jnp.where(again, best, plt.load(token_ref.at[row]))
    log_last = jnp.where(again, finish.at(log_p, found, best), plt.load(known_ref.at[row]))
    place = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(draft_len + 1),), 0)
    outputs = (out_ref, tokens_ref, last, jnp.int32(-1)), (log_out_ref, log_p_ref, log_last, jnp.float32(0.0))
    for ref, drafted_ref, end, nothing in outputs:
        drafted = plt.load(drafted_ref.at[request * draft_len + place], mask=place < draft_len, other=nothing)
        x = jnp.where(place < position, drafted, jnp.where(place == position, end, nothing))
        plt.store(ref.at[request * (draft_len + 1) + place], x, mask=place <= draft_len)


def verify_chain(scores: race.Scores, target: dual.Side, draft: dual.Side, keys, tokens, lens, *, plt, sample, vocab,
                 shares=None, interpret=False):
    """(tokens, their log p `[requests, draft_len + 1]`, accepted tokens `[requests]`).

    Args:
      scores, target, draft, keys: as in `search.search`; rows are request by request, draft_len + 1 or draft_len of each.
      tokens: drafted, int32 `[requests, draft_len]`; lens: how many count, int32 `[requests]`, or None for all.
    """
    requests, draft_len = tokens.shape
    tokens = tokens.reshape(-1)
    (p, p_law), (q, q_law) = arguments_of(target, keys), arguments_of(draft)
    flat, structure = jax.tree.flatten((p, q, tokens, lens))
    i32, f32 = (like(flat, (requests,), dtype) for dtype in (jnp.int32, jnp.float32))
    call = functools.partial(pl.pallas_call, grid=(requests,), interpret=interpret)
    body = functools.partial(walk_kernel, structure=structure, laws=(p_law, q_law), plt=plt, vocab=vocab, draft_len=draft_len)
    position, row, draft_row, factor, leader, log_p = call(
        body, out_shape=[i32, i32, i32, f32, i32, like(flat, tokens.shape, jnp.float32)], name="gumbeljax_walk",
        compiler_params=plt.CompilerParams(num_warps=16, num_stages=1))(*flat)
    found = search_shares(scores, target, draft, keys, search.Asked(row, draft_row, factor), leader, plt=plt, sample=sample,
                          vocab=vocab, shares=shares, interpret=interpret)
    inputs = (position, row, factor, target.normalizer.token, target.normalizer.token_log_prob, tokens, log_p, *found[:5])
    out_shape = [like(inputs, (requests * (draft_len + 1),), dtype) for dtype in (jnp.int32, jnp.float32)]
    out = call(functools.partial(end_kernel, plt=plt, shares=found.high.shape[0], draft_len=draft_len), out_shape=out_shape,
               name="gumbeljax_verified", compiler_params=plt.CompilerParams(num_warps=1, num_stages=1))(*inputs)
    return *(x.reshape(requests, draft_len + 1) for x in out), position
