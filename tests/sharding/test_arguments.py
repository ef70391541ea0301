"""What a shard_map must not hand to a draw: one key for different rows, and arguments that are cut where they must not be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gumbeljax
from gumbeljax import groups, reference, sharding, smc
from tests.sharding import meshes
from tests.sharding.test_traps import ROWS, VOCAB, head


def refuses(sentence, call, *arguments):
    with pytest.raises(ValueError, match=sentence):
        call(*arguments)


def on_shards(call, **specs):
    """A shard_map under jit: outside, each of its operations is a program of its own."""
    return jax.jit(jax.shard_map(lambda *arguments: call(*arguments), **specs))


# Keys: one for rows that differ must not be the same on every shard


def test_one_key_for_two_data_shards_is_refused():
    h, w, keys = head()
    mesh, key = meshes.mesh_of((2, 4)), jax.random.key(3)
    draw = functools.partial(gumbeljax.sample, axis_name="tp")
    whole = functools.partial(gumbeljax.sample, axis_name=())
    for call, third, w_spec, check in [
        (draw, key, P("tp"), True), (draw, key, P("tp"), False), (draw, jax.random.key_data(key), P("tp"), False),
        (whole, key, P(), True), (whole, key, P(), False), (gumbeljax.sample, key, P(), True),
        (draw, keys[:ROWS // 2], P("tp"), True)]:  # the last: one key per row, but the same rows' on both shards
        mapped = on_shards(call, mesh=mesh, in_specs=(P("data"), w_spec, P()), out_specs=P("data"), check_vma=check)
        refuses(r"^key must differ between the shards of the rows; got the same one all over .*'data'.*: pass one key per row, "
                r"sharded like h, or row_offset=jax\.lax\.axis_index\('data'\)", mapped, h, w, third)


NOISY = {  # name: (call(x [rows, n], key), what the keys must be sharded like)
    "sample_logits": (gumbeljax.sample_logits, "logits"),
    "gumbel_softmax": (lambda x, key: gumbeljax.gumbel_softmax(x, key).argmax(-1), "logits"),
    "gumbel_max": (reference.gumbel_max, "logits"),
    "inverse_cdf": (reference.inverse_cdf, "logits"),
    "summarize": (lambda x, key: groups.summarize(x, key).token, "logits"),
    "merge_log_mass": (lambda x, key: groups.merge_log_mass(groups.Candidate(jnp.zeros(x.T.shape, int), x.T), key).token,
                       "the candidates"),
    "merge_online": (lambda x, key: groups.merge_online(*(groups.Candidate(jnp.int32(i), x[:, i]) for i in (0, 1)), key).token,
                     "the candidates"),
    "systematic": (smc.systematic, "log_weights"),
    "multinomial": (smc.multinomial, "log_weights"),
    "choose": (lambda x, key: smc.choose(smc.init((), x), key), "log_weights"),
    "step": (lambda x, key: smc.step(
        smc.init(x, x), key, threshold=0.0, log_weight_fn=lambda x, _: x,
        propose_fn=lambda x, keys: (jax.vmap(jax.vmap(jax.random.normal))(keys), None))[0].particles, "log_weights"),
}


@pytest.mark.parametrize("name", NOISY)
def test_one_key_for_shards_of_anything_that_draws(name):
    """Refused as in `sample`, where types say what varies and where they do not; keys per row give the draws of one device."""
    call, like = NOISY[name]
    x, keys = jnp.zeros((ROWS, 32)) + jnp.arange(32) / 8, jax.random.split(jax.random.key(0), ROWS)
    mesh = meshes.mesh_of((4,), ("data",))
    for third, check in [(keys[0], True), (keys[0], False), (keys[:ROWS // 4], True)]:
        mapped = on_shards(call, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check)
        refuses(rf"^key must differ between the shards of the rows; .* 'data': pass one key per \w+, sharded like {like}\.",
                mapped, x, third)
    alone = jax.jit(lambda x, key: call(x, key))
    for check in (True, False):
        mapped = on_shards(call, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=check)
        np.testing.assert_array_equal(mapped(x, keys), alone(x, keys))
    same = on_shards(call, mesh=mesh, in_specs=(P(), P()), out_specs=P())  # nothing is cut: one key will do
    np.testing.assert_array_equal(same(x, keys[0]), alone(x, keys[0]))


@pytest.mark.parametrize("check", [True, False])
def test_parts_of_a_vocabulary_share_a_key(check):
    """`summarize` with a first_id that varies is of the same rows; without groups a key may be the shard's own."""
    x, key = jax.random.normal(jax.random.key(1), (ROWS, 64)), jax.random.key(0)
    mesh = meshes.mesh_of((4,), ("tp",))

    def part(x, key):
        return jax.tree.map(lambda leaf: leaf[None], groups.summarize(x, key, first_id=jax.lax.axis_index("tp") * 16))

    parts = on_shards(part, mesh=mesh, in_specs=(P(None, "tp"), P()), out_specs=P("tp"), check_vma=check)(x, key)
    whole = functools.reduce(groups.merge, [jax.tree.map(lambda leaf, i=i: leaf[i], parts) for i in range(4)])
    np.testing.assert_array_equal(whole.token, gumbeljax.sample_logits(x, key))
    one = on_shards(lambda x, key: smc.systematic(x[0], key[0])[None], mesh=mesh, in_specs=P("tp"), out_specs=P("tp"),
                    check_vma=check)
    keys = jax.random.split(key, 4)
    np.testing.assert_array_equal(one(x[:4], keys), smc.systematic(x[:4], keys))


# What is cut, and what must not be


def test_a_cut_table_without_axis_name_is_refused():
    h, w, keys = head()
    mesh = meshes.mesh_of((8,), ("tp",))
    for fn in (gumbeljax.sample, gumbeljax.log_prob, gumbeljax.sample_with_log_probs):
        third = jnp.zeros(ROWS, jnp.int32) if fn is gumbeljax.log_prob else keys
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("tp"), P()), out_specs=P())
        refuses(r"^axis_name must name the mesh axes that cut the vocabulary; got None with a w that varies over 'tp': pass "
                r"axis_name, or axis_name=\(\)", mapped, h, w, third)


def test_other_arguments_in_the_wrong_place():
    h, w, keys = head()
    mesh = meshes.mesh_of((2, 4))
    draw = functools.partial(gumbeljax.sample, axis_name="tp")
    for specs, sentence in [
        ((P(), P(), P()), r"^w must be cut over axis_name; got one that is the same all over 'tp'"),
        ((P("tp"), P("tp"), P("tp")), r"^h must be the same on all shards of the vocabulary; got one that varies over 'tp'"),
        ((P(), P("tp"), P("tp")), r"^key must be the same on all shards of the vocabulary; got one that varies over 'tp'")]:
        refuses(sentence, jax.shard_map(draw, mesh=mesh, in_specs=specs, out_specs=P("tp")), h, w, keys)
    hot = jax.shard_map(lambda h, w, k, t: draw(h, w, k, temperature=t[0]), mesh=mesh, out_specs=P(),
                        in_specs=(P(), P("tp"), P(), P("tp")))
    refuses(r"^temperature must be the same on all shards", hot, h, w, keys, jnp.ones(4))
    refuses(r"^axis_name must name axes of a shard_map around the call; got 'tp', which is none", draw, h, w, keys)
    refuses(r"^row_offset must be None when key has the batch's shape", functools.partial(gumbeljax.sample, row_offset=1), h, w,
            keys)
    with pytest.raises(TypeError, match=r"^axis_name must be the name of a mesh axis or a tuple of names; got 3"):
        gumbeljax.sample(h, w, keys, axis_name=3)
    with pytest.raises(TypeError, match=r"^row_offset must be one integer"):
        gumbeljax.sample(h, w, keys[0], row_offset=jnp.ones(2, jnp.int32))
    refuses(r"^axis_name must name a mesh axis once", functools.partial(gumbeljax.sample, axis_name=("tp", "tp")), h, w, keys)
    with pytest.raises(NotImplementedError, match=r"^axis_name is for method='grouped'; got method='categorical': leave"):
        jax.shard_map(functools.partial(draw, method="categorical"), mesh=mesh, in_specs=(P(), P("tp"), P()),
                      out_specs=P())(h, w, keys)


def test_what_needs_the_whole_vocabulary_refuses_explicit_axes_too():
    h, w, _ = head()
    mesh = meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit)
    cut = jax.device_put(w, jax.NamedSharding(mesh, P("tp")))
    whole = {"w must be whole for a law": (gumbeljax.kept_tokens, gumbeljax.processed_log_probs,
                                           functools.partial(gumbeljax.top_log_probs, num=2)),
             "method='categorical' on a cut": (
                 functools.partial(gumbeljax.sample, key=jax.random.key(0), method="categorical"),)}
    for sentence, functions in whole.items():
        for fn in functions:
            for call in (fn, jax.jit(fn)):
                with pytest.raises(NotImplementedError, match=rf"^{sentence} .*; got .*cut over .*'tp': "):
                    call(h, cut)
    logits = jax.device_put(h @ w.T, jax.NamedSharding(mesh, P("data", "tp")))
    refuses(r"^logits must be whole along the vocabulary; got some that are cut over 'tp'", gumbeljax.sample_logits, logits,
            jax.random.key(0))
    rows = jax.device_put(h @ w.T, jax.NamedSharding(mesh, P("data")))
    np.testing.assert_array_equal(gumbeljax.sample_logits(rows, jax.random.key(0)),
                                  gumbeljax.sample_logits(h @ w.T, jax.random.key(0)))


def test_what_shards_do_not_do_yet_is_refused():
    h, w, keys = head()
    draw = functools.partial(gumbeljax.sample_sharded, mesh=meshes.mesh_of((4,), ("tp",)), axis_name="tp")
    counts = gumbeljax.count_tokens(np.zeros((ROWS, 1), int), VOCAB)
    late = gumbeljax.Processors(end_tokens=[3], min_new_tokens=2, counts=counts)
    refuses(r"^num_new_tokens must be given with min_new_tokens on a vocabulary that is cut over devices",
            functools.partial(draw, processors=late), h, w, keys)
    refuses(rf"^banned_tokens must name token ids from 0 to {VOCAB - 1}",
            functools.partial(draw, processors=gumbeljax.Processors(banned_tokens=[VOCAB])), h, w, keys)


def test_bad_arguments_of_on_mesh():
    h, w, keys = head()
    mesh = meshes.mesh_of((2, 4))
    draw = functools.partial(gumbeljax.sample_sharded, mesh=mesh, axis_name="tp")
    refuses(r"^axis_name must name axes of the mesh, 'data', 'tp'; got 'x'", functools.partial(draw, axis_name="x"), h, w, keys)
    refuses(r"^w must have a vocabulary that 4 shards divide; got 255: pad it once with gumbeljax\.sharding\.pad_vocab",
            draw, h, w[1:], keys)
    refuses(r"^h must have a number of rows that 2 shards divide; got 15", functools.partial(draw, data_axis="data"), h[1:], w,
            keys[1:])
    refuses(r"^h must not be cut over the mesh axes of the vocabulary; got 'tp' for both",
            functools.partial(draw, data_axis="tp"), h, w, keys)
    refuses(r"^mesh must be given when none is around the call", functools.partial(draw, mesh=None), h, w, keys)
    refuses(r"^data_axis must be None for an h of rank 1", functools.partial(draw, data_axis="data"), h[0], w, keys[0])
    refuses(rf"^temperature must be a scalar or have the batch's shape \[{ROWS}\]; got \[3\]",
            functools.partial(draw, data_axis="data", temperature=np.ones(3)), h, w, keys)
    refuses(r"^temperature must be finite", functools.partial(draw, temperature=-1.0), h, w, keys)
    refuses(r"^top_k must be at least -1", functools.partial(draw, top_k=np.full(ROWS, -3)), h, w, keys)
    counts = gumbeljax.count_tokens(np.zeros((ROWS, 1), int), VOCAB)
    hurts = gumbeljax.Processors(repetition_penalty=-1.0, counts=counts)
    refuses(r"^repetition_penalty must be finite and positive", functools.partial(draw, processors=hurts), h, w, keys)
    for wrong, sentence in [({"processors": {}}, r"^processors must be a gumbeljax.Processors; got dict"),
                            ({"mask": [1] * (VOCAB // 32)}, r"^mask must be boolean, .*; got dtype int64"),
                            ({"mesh": "tp"}, r"^mesh must be a jax.sharding.Mesh or None; got str")]:
        with pytest.raises(TypeError, match=sentence):
            draw(h, w, keys, **wrong)
    with pytest.raises(TypeError, match=r"^fn must be gumbeljax.sample, "):
        sharding.on_mesh(gumbeljax.kept_tokens, mesh=mesh, axis_name="tp")
    refuses(rf"^logit_bias must be as wide as the vocabulary of w, {VOCAB}", functools.partial(draw, logit_bias=np.ones(7)),
            h, w, keys)
    mesh = meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit)
    cut = jax.device_put(w, jax.sharding.NamedSharding(mesh, P(None, "tp")))
    refuses(r"^w must be whole along d_model; got one that is cut over 'tp' there", gumbeljax.sample, h, cut, keys)
    refuses(r"^w must be \[vocab, d_model\]", functools.partial(sharding.pad_vocab, num_shards=2), jnp.ones(3))
