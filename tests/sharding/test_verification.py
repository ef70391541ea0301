"""Verification with tables cut over the vocabulary: the tokens of one device, and a few numbers per position that move."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gumbeljax
from benchmarks.collectives import Collective, in_and_out_of_loops
from gumbeljax import sharding
from gumbeljax.speculative import Law, cut, verify, verify_chains, verify_coupled
from tests import heads
from tests.sharding import meshes

ROWS, DRAFT_LEN, VOCAB, D = 16, 3, 512, 32
VERIFIERS = {"one chain": verify, "chains": verify_chains, "coupled": lambda p, _, drafts, key, **more: verify_coupled(
    p, drafts, key, **more)}


class Case(NamedTuple):
    """Arrays of a call; `third` is a tree of what is cut like the rows."""

    h: jax.Array
    w: jax.Array
    draft_h: jax.Array
    draft_w: jax.Array
    third: dict


@functools.cache
def case(chains=None, vocab=VOCAB) -> Case:
    """Laws that overlap by half or so, drafts from the draft's, ragged lengths, temperatures with greedy rows."""
    lead = (ROWS,) if chains is None else (ROWS, chains)
    h, w = heads.exact_head(vocab, D, ROWS * (DRAFT_LEN + 1))
    h = h.reshape(ROWS, DRAFT_LEN + 1, D)
    if chains is not None:  # one prefix, so one law at the first position; then their own
        h = jnp.stack([h, *(jnp.roll(h, i, axis=0).at[:, 0].set(h[:, 0]) for i in range(1, chains))], axis=1)
    draft_w = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.05, w.shape), 0.0, w)
    t = jnp.asarray(np.random.default_rng(0).choice([0.0, 0.5, 1.0], ROWS, p=[0.2, 0.3, 0.5]), jnp.float32)
    t = t if chains is None else jnp.broadcast_to(t[:, None], lead)
    draft_h = h[..., :-1, :]
    warm = jnp.broadcast_to(jnp.maximum(t, 0.3)[..., None], (*lead, DRAFT_LEN))
    drafts = gumbeljax.sample(draft_h, draft_w, jax.random.key(5), temperature=warm)
    third = {"drafts": drafts, "keys": jax.random.split(jax.random.key(7), (ROWS, DRAFT_LEN + 1)), "t": t,
             "lens": jax.random.randint(jax.random.key(9), lead, 1, DRAFT_LEN + 1)}
    return Case(h, w, draft_h, draft_w, third)


def calls(name, which, p_options, q_options, more):
    """`verify` of the arrays, with axis_name where `which` says that a table is cut, or without (the call of one device)."""
    def call(h, w, draft_h, draft_w, third, *, axes=None):
        axis_of = lambda side: axes if side in which else None  # noqa: E731
        t, q = third["t"], None
        p = Law(h, w, temperature=t, axis_name=axis_of("target"), **p_options)
        if "target logits" in which:
            p = Law(jnp.matmul(h, w.T, precision="highest"), temperature=t, **p_options)
        if "no draft" not in which:
            q = Law(draft_h, draft_w, temperature=jnp.maximum(t, 0.3), axis_name=axis_of("draft"), **q_options)
        return VERIFIERS[name](p, q, third["drafts"], third["keys"], draft_lens=third["lens"], **more)

    return call


def on_mesh(call, which, shape=(2, 4), axes="tp", data_axis="data", check_vma=True):
    spec = lambda side: P(axes) if side in which else P()  # noqa: E731
    rows = P(data_axis)
    return jax.jit(jax.shard_map(
        functools.partial(call, axes=axes), mesh=meshes.mesh_of(shape), check_vma=check_vma, out_specs=rows,
        in_specs=(rows, spec("target"), rows, spec("draft"), rows)))


def assert_same(got, want):
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.num_accepted, want.num_accepted)
    np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=1e-5, atol=1e-5)
    if hasattr(want, "chain"):
        np.testing.assert_array_equal(got.chain, want.chain)


FILTERS = {"top_p": 0.8}
CASES = {
    "both": ("one chain", ("target", "draft"), {}, {}),
    "target alone": ("one chain", ("target",), {}, {}),
    "draft alone": ("one chain", ("draft",), {}, {}),
    "one token": ("one chain", ("target", "no draft"), {}, {}),
    "target as logits": ("one chain", ("draft", "target logits"), {}, {}),
    "chains": ("chains", ("target", "draft"), {}, {}),
    "chains, target alone": ("chains", ("target",), {}, {}),
    "coupled": ("coupled", ("target", "no draft"), {}, {}),
    "filters": ("one chain", ("target", "draft"), FILTERS, {"top_k": 40}),
    "filters of the draft, which is whole": ("one chain", ("target",), {}, FILTERS | {"min_p": 0.01}),
    "filters of chains": ("chains", ("target", "draft"), {"top_k": 100}, {}),
    "filters, coupled": ("coupled", ("target", "no draft"), {"top_k": 30, "top_p": 0.9}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_of_one_device(name):
    verifier, which, p_options, q_options = CASES[name]
    arrays = case(2 if verifier == "chains" else None)
    call = calls(verifier, which, p_options, q_options, {})
    want = jax.jit(call)(*arrays)
    assert_same(on_mesh(call, which)(*arrays), want)
    accepted = np.asarray(want.num_accepted)
    assert verifier == "coupled" or (0 < accepted.mean() < DRAFT_LEN and (accepted < arrays.third["lens"].min()).any())


@pytest.mark.parametrize("name", ["both", "draft alone", "one token", "chains, target alone", "coupled",
                                  "filters of the draft, which is whole"])
def test_explicit_axes_say_it_all(name):
    """One key for the batch; nothing is named; eager, and inside jit."""
    verifier, which, p_options, q_options = CASES[name]
    arrays = case(2 if verifier == "chains" else None)
    arrays = arrays._replace(third=arrays.third | {"keys": jax.random.key(11)})
    call = calls(verifier, which, p_options, q_options, {})
    mesh = meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit)
    put = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    placed = Case(put(arrays.h, "data"), put(arrays.w, "tp") if "target" in which else arrays.w, arrays.draft_h,
                  put(arrays.draft_w, "tp") if "draft" in which else arrays.draft_w, arrays.third)
    want = jax.jit(call)(*arrays)
    assert_same(jax.jit(call)(*placed), want)
    if name == "both":
        got = call(*placed)
        assert_same(got, want)
        assert got.tokens.sharding.spec[0] == "data"


def test_explicit_axes_and_options_of_every_shape():
    """Options by name, for a request and for a position, numbers and lists; drafts in lists."""
    h, w, draft_h, draft_w, third = case()
    mesh = meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit)
    put = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    counts = gumbeljax.count_tokens(np.arange(3 * ROWS).reshape(ROWS, 3), VOCAB)
    processors = gumbeljax.Processors(banned_tokens=[3, 7], presence_penalty=np.linspace(0, 2, ROWS), counts=counts)
    mask = np.random.default_rng(0).random((ROWS, VOCAB)) < 0.9
    bias = np.random.default_rng(0).normal(size=(ROWS, DRAFT_LEN + 1, VOCAB)).astype(np.float32)

    def call(h, w, draft_h, draft_w):
        p = Law(h, w, temperature=third["t"].tolist(), mask=mask, logit_bias=bias, processors=processors)
        q = Law(draft_h, draft_w, temperature=0.8, logit_bias={5: 1.0, 300: 2.0})
        return verify(p, q, third["drafts"].tolist(), jax.random.key(1), draft_lens=2)

    assert_same(call(put(h, "data"), put(w, "tp"), draft_h, put(draft_w, "tp")), call(h, w, draft_h, draft_w))


@pytest.mark.parametrize("axes", [("data", "tp"), ("tp", "data")])
def test_a_vocabulary_over_two_mesh_axes(axes):
    call, which = calls("one chain", ("target", "draft"), {}, {}, {}), ("target", "draft")
    assert_same(on_mesh(call, which, axes=axes, data_axis=None)(*case()), jax.jit(call)(*case()))


def test_with_the_check_switched_off():
    call, which = calls("one chain", ("target", "draft"), FILTERS, {}, {}), ("target", "draft")
    assert_same(on_mesh(call, which, check_vma=False)(*case()), jax.jit(call)(*case()))


def test_padding_bias_and_mask():
    """A vocabulary of 500 in tables of 512; a target in the other layout; the draft, whole, is not padded."""
    arrays = case(vocab=500)
    wide = sharding.pad_vocab(arrays.w, 4)
    bias, mask = jax.random.normal(jax.random.key(1), (500,)), jax.random.bernoulli(jax.random.key(2), 0.8, (500,))
    own = {"logit_bias": bias, "mask": mask, "scale": 0.5, "soft_cap": 5.0}
    want = jax.jit(calls("one chain", ("target",), own, {"logit_bias": bias}, {}))(*arrays)

    def call(h, w, draft_h, draft_w, third, bias, mask):
        p = Law(h, w.T, temperature=third["t"], valid_vocab=500, vocab_axis=1, axis_name="tp", **own | {
            "logit_bias": bias, "mask": mask})
        q = Law(draft_h, draft_w, temperature=jnp.maximum(third["t"], 0.3), logit_bias=own["logit_bias"])
        return verify(p, q, third["drafts"], third["keys"], draft_lens=third["lens"])

    rows = P("data")
    got = jax.jit(jax.shard_map(call, mesh=meshes.mesh_of((2, 4)), out_specs=rows,
                                in_specs=(rows, P("tp"), rows, P(), rows, P("tp"), P("tp"))))(
        arrays.h, wide, *arrays[2:], jnp.pad(bias, (0, 12), constant_values=9.0), jnp.pad(mask, (0, 12), constant_values=True))
    assert_same(got, want)


def test_rows_without_a_law_and_drafts_that_do_not_exist():
    arrays = case()
    third = arrays.third | {"drafts": arrays.third["drafts"].at[0, 1].set(-1).at[1, 0].set(VOCAB), "t": jnp.ones(ROWS)}
    arrays = arrays._replace(h=arrays.h.at[2, 0, 0].set(jnp.nan), draft_h=arrays.draft_h.at[3, 1].set(jnp.inf), third=third)
    call, which = calls("one chain", ("target", "draft"), {}, {}, {}), ("target", "draft")
    want = jax.jit(call)(*arrays)
    assert int(want.tokens[2, 0]) == -1 and int(want.num_accepted[3]) <= 1 and int(want.num_accepted[1]) == 0
    assert_same(on_mesh(call, which)(*arrays), want)


def test_a_wrong_merge_is_seen(monkeypatch):
    """If every shard kept its own residual draw, some token would be another."""
    gather = cut._mesh.gather

    def own_first(values, axes):
        heard = gather(values, axes)
        return tuple(jnp.broadcast_to(x[:1], x.shape) for x in heard) if len(values) == 6 and values[2].dtype == jnp.int32 \
            and values[3].dtype == jnp.float32 else heard

    call, which = calls("one chain", ("target", "draft"), {}, {}, {}), ("target", "draft")
    want = jax.jit(call)(*case())
    monkeypatch.setattr(cut._mesh, "gather", own_first)
    jax.clear_caches()
    got = on_mesh(call, which)(*case())
    jax.clear_caches()
    assert (got.tokens != want.tokens).any()


# What is moved


def moved(name, *options, which=("target", "draft"), chains=None):
    call = calls(name, which, *options, {})
    return in_and_out_of_loops(on_mesh(call, which).lower(*case(chains)).compile())


def test_a_few_numbers_per_position_move():
    """One chain: the target's draw, the draft's mass, the drafted tokens' logits; for a rejection the search, and the race if
    that did not decide."""
    positions, drafted, rows, shards = ROWS // 2 * (DRAFT_LEN + 1), ROWS // 2 * DRAFT_LEN, ROWS // 2, 4
    once, in_loops = moved("one chain", {}, {})
    gathers = [24 * positions * shards, 12 * drafted * shards, 24 * rows * shards, 24 * rows * shards]
    assert sorted(once) == sorted([*(Collective("all-gather", size) for size in gathers),
                                   Collective("all-reduce", 4 * (positions + drafted))])
    assert not in_loops
    once, in_loops = moved("coupled", {}, {}, which=("target", "no draft"))
    assert once == [Collective("all-gather", 24 * positions * shards)] and not in_loops


@pytest.mark.parametrize("chains, options", [(2, {}), (None, {"min_p": 0.01})])
def test_nothing_of_the_size_of_a_vocabulary_moves(chains, options):
    once, in_loops = moved("one chain" if chains is None else "chains", options, {}, chains=chains)
    rows = ROWS // 2 * (chains or 1) * (DRAFT_LEN + 1)
    assert once + in_loops and max(c.num_bytes for c in once + in_loops) <= 24 * rows * 4 < 4 * VOCAB // 4 * rows


# What is refused


def refuses(sentence, call, *arrays, specs, error=ValueError):
    mapped = jax.shard_map(call, mesh=meshes.mesh_of((2, 4)), in_specs=specs, out_specs=P())
    with pytest.raises(error, match=sentence):
        jax.jit(mapped)(*arrays)


def test_what_is_refused():
    h, w, draft_h, draft_w, third = case()
    drafts, key = third["drafts"], jax.random.key(0)
    plain = lambda h, w: verify(Law(h, w), None, drafts, key).tokens  # noqa: E731
    refuses(r"^axis_name must name the mesh axes that cut the vocabulary; got None with a w that varies over 'tp'", plain, h, w,
            specs=(P(), P("tp")))
    both = lambda h, w, x, y: verify(Law(h, w, axis_name="tp"), Law(x, y, axis_name="tp"), drafts, key).tokens  # noqa: E731
    wide = jnp.pad(draft_w, ((0, 64), (0, 0)))
    refuses(rf"^draft must have as many tokens as the target, {VOCAB}; got {VOCAB + 64}", both, h, w, draft_h, wide,
            specs=(P(), P("tp"), P(), P("tp")))
    ragged = lambda h, w, x, y: verify(Law(h, w, axis_name="tp"), Law(  # noqa: E731
        x, y, axis_name="tp", valid_vocab=VOCAB), drafts, key).tokens
    refuses(r"^draft must be cut over the mesh axes of the target, at the same ids: .* 128 to a shard; got .* 144 to a shard",
            ragged, h, w, draft_h, wide, specs=(P(), P("tp"), P(), P("tp")))
    for name, place in (("draft_tokens", 1), ("key", 2)):
        specs = [P(), P(), P()]
        specs[place] = P("data")
        call = lambda h, d, k, w: verify(Law(h, w, axis_name=("data", "tp")), None, d, k[0]).tokens  # noqa: E731
        refuses(rf"^{name} must be the same on all shards of the vocabulary; got one that varies over 'data'", call,
                h[:8], drafts if place == 1 else drafts[:8], jax.random.split(key, 2), w, specs=(*specs, P(("data", "tp"))))
    once = lambda h, w: verify(Law(h, w, axis_name="tp"), None, drafts[:8], key).tokens  # noqa: E731
    refuses(r"^key must differ between the shards of the rows; got the same one all over 'data': pass one key per position, "
            r"sharded like h\.", once, h, w, specs=(P("data"), P("tp")))
    logits = lambda x, w, y: verify(Law(x), Law(y, w, axis_name="tp"), drafts, key).tokens  # noqa: E731
    refuses(r"^logits must be the same on all shards of the vocabulary; got one that varies over 'tp'", logits,
            jnp.zeros((ROWS, DRAFT_LEN + 1, 4 * VOCAB)), w, draft_h, specs=(P(None, None, "tp"), P("tp"), P()))
    mesh = meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit)
    put = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    with pytest.raises(ValueError, match=r"^h must be whole along its positions; got one that is cut over 'tp' there"):
        verify(Law(put(h, None, "tp"), w), None, drafts, key)
    with pytest.raises(ValueError, match=r"^draft_tokens must be \[\*batch, draft_len\]"):
        verify(Law(h, put(w, "tp")), None, drafts[:, :2], key)
    with pytest.raises(ValueError, match=r"^target must have no axis_name when it is given as logits; got 'tp'"):
        verify(Law(jnp.zeros((1, 2, 8)), axis_name="tp"), None, jnp.zeros((1, 1), jnp.int32), key)
