"""Verification of one chain a request behind its passes over the tables, on NVIDIA GPUs, through Pallas' Triton backend.

One launch: at a few rows each costs about as much as what it does. Some programs a request; each merges what the pieces of the
tables say of its rows and walks along the drafted tokens, all alike, and then takes its share of the search for what replaces a
rejected token (`triton_search`), which also draws the token from p where the walk ended. The program that ends last, which a
number in memory tells, writes what comes of it.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import dual, finish, noise, race, search
from pallas_kernels.logits import Elementwise, model_logits, processed_logits
from pallas_kernels.triton_finish import like, products
from pallas_kernels.triton_search import WARPS, Row, arguments_of, choose_shares, drawn_in, share_of_search, vectors_at
from pallas_kernels.vectors import Vectors, pack

PIECES = 2**12  # numbers of pieces and rows that a program merges at a time
WARM = 0.25  # at a lower temperature the rounding of logits that are made again matters, divided by it


def merged(plt, refs, rows, merge, empties):
    """What the pieces `[pieces, all rows]` of a NamedTuple say together of some rows `[n]`."""
    num_pieces, num_rows = jax.tree.leaves(refs)[0].shape[0], rows.shape[0]
    size = min(pl.next_power_of_2(num_pieces), max(1, PIECES // num_rows))

    def part(i):
        piece = i * size + lax.broadcasted_iota(jnp.int32, (size, num_rows), 0)
        load = lambda ref, other: plt.load(ref.at[piece, rows[None, :]], mask=piece < num_pieces, other=other)  # noqa: E731
        return merge(type(refs)(*map(load, refs, empties)))

    def with_part(i, best):
        is_first = lax.broadcasted_iota(jnp.int32, (2, num_rows), 0) == 0
        return merge(jax.tree.map(lambda old, new: jnp.where(is_first, old[None], new[None]), best, part(i)))

    return lax.fori_loop(1, pl.cdiv(num_pieces, size), with_part, part(0)) if size < num_pieces else part(0)


def log_law_at(plt, refs, law, rows, ids, t, known, raw):
    """Log-probabilities of one token `ids` of each row, all `[n]`, from its `products`."""
    side = dual.Side(refs["h"], None, t, Elementwise(), known)
    if refs["h"] is None:
        return dual.log_law(None, ids, side)
    options = {name: plt.load(ref.at[ids] if len(ref.shape) == 1 else ref.at[rows, ids])
               for name, ref in zip(law["dense"], refs["dense"], strict=False)}
    own = Elementwise(**{name: x != 0 if x.dtype == jnp.int8 else x for name, x in options.items()})
    x = processed_logits(model_logits(jnp.sum(raw, axis=1), law["scale"], law["soft_cap"], own.weight_scale), own)
    return dual.log_law(x, ids, side)


def kernel(
    *refs,  # of both laws what `arguments_of` lists, with pieces in place of normalisers, and vectors of both with the target;
    # drafted tokens i32 [requests * draft_len] (their number i32 [requests]); scores i32 [tiles, all rows]; outputs: tokens,
    # their log p [requests * (draft_len + 1)], accepted tokens [requests]; what programs say [shares, requests]; vectors again
    structure, laws, num_targets, num_columns, plt, sample, vocab, width, shares, draft_len,
):
    """What one program does: a share of a request."""
    num_inputs = structure.num_leaves
    target, draft, tokens_ref, lens_ref, told_ref = jax.tree.unflatten(structure, refs[:num_inputs])
    out_ref, log_out_ref, position_ref, *said_refs, vectors_ref = refs[num_inputs:]
    request, share = (f(pl.program_id(0), jnp.int32(shares)) for f in (lax.div, lax.rem))  # int32 under x64 too
    zero = request - request  # a start that is not a constant: JAX refuses slices that it can see to end out of bounds
    place = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(draft_len + 1),), 0)
    is_drafted = place < draft_len
    first_p, first_q = request * (draft_len + 1), request * draft_len
    p_rows, q_rows = first_p + jnp.minimum(place, draft_len), first_q + jnp.minimum(place, draft_len - 1)
    token = plt.load(tokens_ref.at[first_q + place], mask=is_drafted, other=-1)
    ids = jnp.clip(token, 0, vocab - 1)
    is_real = (token >= 0) & (token < vocab) & is_drafted
    if lens_ref is not None:
        is_real &= place < plt.load(lens_ref.at[request])

    t, keys = vectors_at(plt, target["vectors"], p_rows, zero, 2)
    t_q, _ = vectors_at(plt, None if draft["h"] is None else target["vectors"], num_targets + q_rows, zero, 0)
    # What takes longest first: rows of the tables that no cache has.
    raw_p, raw_q = (None if refs["h"] is None else products(plt, refs["h"], refs["w"], rows, ids, is_real, zero,
                                                            d_model=law["d_model"], vocab_axis=law["vocab_axis"])
                    for refs, law, rows in ((target, laws[0], p_rows), (draft, laws[1], q_rows)))
    won = merged(plt, target["normalizer"], p_rows, lambda x: race.merge(x, t), (-jnp.inf, 0.0, race.NO_ID, -jnp.inf, 0.0))
    nowhere = jnp.full_like(token, -1)
    p_known = dual.Normalizer(won.top, won.total, nowhere, jnp.zeros_like(won.top))
    q_known = dual.Normalizer(None, None, token, None)
    if draft["h"] is not None:
        mass = merged(plt, draft["normalizer"], q_rows, lambda x: race.merge_masses(x, t_q), (-jnp.inf, race.NO_ID, 0.0))
        q_known = dual.Normalizer(mass.top, mass.total, mass.argmax, None)
    log_p = log_law_at(plt, target, laws[0], p_rows, ids, t, p_known, raw_p)
    log_q = log_law_at(plt, draft, laws[1], q_rows, ids, t_q, q_known, raw_q)
    is_real &= dual.is_law(p_known) & dual.is_law(q_known)
    coin = noise.log_coin(keys[0], keys[1], 0)

    at = lambda x, j: jnp.sum(jnp.where(place == j, x, jnp.zeros_like(x)), axis=0, dtype=x.dtype, keepdims=True)  # noqa: E731
    least = lambda condition: jnp.min(jnp.where(condition, place, draft_len))  # noqa: E731
    tree_at = lambda tree, j: jax.tree.map(lambda x: at(x, j), tree)  # noqa: E731
    # Where it is cold, the token drawn from p is known to the last bit, and at 0 the only one. It is asked for where the
    # drafted one may be it, up to the first that is rejected all the same.
    is_accepted = coin < log_p - log_q  # a NaN where p and q are 0: not accepted
    is_cold = is_real & (t < WARM) & (token >= won.winner) & (token < won.winner + noise.GROUP)
    is_cold &= place < least(~(is_real & (is_cold | is_accepted)))

    def settle(state):
        j, log_p = state
        own, drafted = tree_at(won, j), at(token, j)
        row = Row(target, laws[0], first_p + j, at(t, j), None)
        first = jnp.max(own.winner)
        draw = drawn_in(plt, row, row.products(plt, first, zero, vocab, True), own, first, tuple(at(x, j) for x in keys),
                        sample=sample, vocab=vocab)[2]
        exact = jnp.where(draw.token == drafted, draw.tempered_log_prob, jnp.where(row.t == 0.0, -jnp.inf, at(log_p, j)))
        return least(is_cold & (place > j)), jnp.where(place == j, exact, log_p)

    log_p = lax.while_loop(lambda state: state[0] < draft_len, settle, (least(is_cold), log_p))[1]
    position, num_proposed = least(~(is_real & (coin < log_p - log_q))), least(~is_real)

    # Greedy rows have one token to be drawn, whatever q says of it.
    last = jnp.minimum(position, draft_len - 1)
    p = Row(target, laws[0], first_p + position, at(t, position), tree_at(p_known, position))
    q = Row(draft, laws[1], first_q + last, None if t_q is None else at(t_q, last), tree_at(q_known, last))
    factor = ((position < num_proposed) & (p.t != 0.0)).astype(jnp.float32)
    own = tree_at(won, position)
    found, drawn, log_drawn = share_of_search(
        plt, p, q, tuple(at(x, position) for x in keys), factor, told_ref, share, vectors_ref, (zero, num_columns + request),
        own, sample=sample, vocab=vocab, width=width, shares=shares, floor=-math.inf)

    said = *found[:5], drawn, log_drawn
    for ref, value in zip(said_refs, said, strict=True):
        plt.store(ref.at[share, pl.ds(request, 1)], value)
    is_end = plt.atomic_add(vectors_ref, (zero + 1, num_columns + request), jnp.uint32(1)) == shares - 1
    shares_of = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(shares),), 0)
    empties = -jnp.inf, 0.0, race.NO_ID, -jnp.inf, 0.0, race.NO_ID, 0.0
    high, low, token_r, log_r, mass, drawn, log_drawn = (
        plt.load(ref.at[shares_of, request], mask=(shares_of < shares) & is_end, other=other, volatile=True)
        for ref, other in zip(said_refs, empties, strict=True))
    best, drawn_token = race.best_score(high, low, token_r)[2], jnp.min(drawn)
    again = (jnp.max(factor) > 0.0) & (jnp.sum(mass) > search.NEGLIGIBLE)
    end = jnp.where(again, best, drawn_token)
    log_end = jnp.where(again, finish.at(log_r, token_r, best), finish.at(log_drawn, drawn, drawn_token))
    outputs = (out_ref, token, end, jnp.int32(-1)), (log_out_ref, log_p, log_end, jnp.float32(0.0))
    for ref, drafted, value, nothing in outputs:
        x = jnp.where(place < position, drafted, jnp.where(place == position, value, nothing))
        plt.store(ref.at[first_p + place], x, mask=(place <= draft_len) & is_end)
    plt.store(position_ref.at[request], position, mask=is_end)


def verify_chain(target: dual.Side, draft: dual.Side, keys, tokens, lens, *, race_pieces, mass_pieces, plt, sample, vocab,
                 shares=None, interpret=False):
    """(tokens, their log p `[requests, draft_len + 1]`, accepted tokens `[requests]`).

    Args:
      target, draft: the laws, request by request draft_len + 1 or draft_len rows of each; normalisers are made here, unless the
        draft has nothing else.
      keys: of the target's rows.
      tokens: drafted, int32 `[requests, draft_len]`; lens: how many count, int32 `[requests]`, or None for all.
      race_pieces, mass_pieces: the passes over the target's and the draft's table.
    """
    requests, draft_len = tokens.shape
    t, num_targets = target.t, requests * (draft_len + 1)
    if draft.h is not None:
        t = jnp.concatenate([t, draft.t])
    # One small kernel of XLA packs what all others read of the rows of both laws, and zeros that programs count from. Behind
    # the draft's rows there is room for a tile.
    num_columns = t.shape[0]
    padded = tuple(jnp.pad(x, (0, num_columns - num_targets)) for x in keys)
    vectors = pack(t, padded, spare=256 + requests)
    pieces, scores = race_pieces(target.h, target.w, keys, target.t, target.options, sample=sample,
                                 vectors=Vectors(vectors))
    known = draft.normalizer
    if draft.h is not None:
        known = mass_pieces(draft.h, draft.w, draft.t, draft.options, vectors=Vectors(vectors), column=num_targets)
    (p, p_law), (q, q_law) = (arguments_of(side._replace(normalizer=x), own)
                              for side, x, own in ((target, pieces, vectors), (draft, known, None)))
    flat, structure = jax.tree.flatten((p, q, tokens.reshape(-1), lens, scores.told))
    shares = shares or choose_shares(requests)
    out, of_programs = (num_targets,), (shares, requests)
    i32, f32 = jnp.int32, jnp.float32
    said = ((of_programs, kind) for kind in (f32, f32, i32, f32, f32, i32, f32))
    out_shape = [(out, i32), (out, f32), ((requests,), i32), *said, (vectors.shape, jnp.uint32)]
    body = functools.partial(kernel, structure=structure, laws=(p_law, q_law), num_targets=num_targets,
                             num_columns=num_columns, plt=plt, sample=sample, vocab=vocab, width=scores.width, shares=shares,
                             draft_len=draft_len)
    tokens, log_p, position, *_ = pl.pallas_call(
        body, grid=(requests * shares,), out_shape=[like(flat, *x) for x in out_shape], interpret=interpret,
        input_output_aliases={next(i for i, x in enumerate(flat) if x is vectors): len(out_shape) - 1},
        name="gumbeljax_verify_chain", compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1))(*flat)
    return *(x.reshape(requests, draft_len + 1) for x in (tokens, log_p)), position
