"""top_k, top_p and min_p on a vocabulary cut over devices: the kept set of one device, on any mesh, and the rounds it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from gumbeljax import _cut_filters
from pallas_kernels.kept import Filters, Kept
from pallas_kernels.kept_set import kept_set
from tests import filter_oracle as oracle
from tests import knobs
from tests.filter_oracle import Options
from tests.sharding import meshes

VOCAB = 2176  # 8 shards of 272 = 17 groups, none of them a power of two
MESHES = {"1": ((1,), ("tp",)), "2": ((2,), ("tp",)), "4": ((4,), ("tp",)), "8": ((8,), ("tp",)),
          "two axes": ((2, 4), ("data", "tp")), "two axes, turned": ((2, 4), ("tp", "data"))}


def rows_of(vocab=VOCAB, seed=0):
    """(names, logits, options): one row for everything that the search can meet."""
    rng = np.random.default_rng(seed)
    normal, grid = rng.normal(size=vocab), rng.integers(-8, 9, vocab) / 2.0
    ids = np.arange(vocab)
    last = np.where(ids == vocab - 1, 30.0, 0.0)
    rows = [  # name, logits, top_k, top_p, min_p, temperature
        ("off", normal, 0, 1.0, 0.0, 1.0),
        ("k", normal, 20, 1.0, 0.0, 1.0),
        ("k 1", normal, 1, 1.0, 0.0, 1.0),
        ("k = what a shard sends", np.where(ids < vocab // 8, normal + 20, normal), _cut_filters.CANDIDATES, 1.0, 0.0, 1.0),
        ("one more", np.where(ids < vocab // 8, normal + 20, normal), _cut_filters.CANDIDATES + 1, 1.0, 0.0, 1.0),
        ("k V-1", normal, vocab - 1, 1.0, 0.0, 1.0),
        ("k V", normal, vocab, 1.0, 0.0, 1.0),
        ("k wide", normal, 2**31 - 1, 1.0, 0.0, 1.0),
        ("p", normal * 4, 0, 0.9, 0.0, 1.0),
        ("p of the search", normal, 0, 0.9, 0.0, 1.0),
        ("p 0", normal, 0, 0.0, 0.0, 1.0),
        ("p 1-1e-6", normal, 0, 1 - 1e-6, 0.0, 1.0),
        ("m", normal * 2, 0, 1.0, 0.05, 1.0),
        ("m 1", grid, 0, 1.0, 1.0, 0.7),
        ("k, p", normal * 2, 50, 0.9, 0.0, 1.5),
        ("k, p, m of the search", normal, 900, 0.7, 0.1, 1.0),
        ("k of the search, p not", normal * 4, 900, 0.5, 0.0, 1.0),
        ("ties", grid, 333, 1.0, 0.0, 1.0),
        ("ties of a mass", grid, 0, 0.77, 0.0, 2.0),
        ("flat", 0 * normal, 0, 0.4, 0.0, 1.0),
        ("flat, k", 0 * normal - 3, 700, 1.0, 0.0, 1.0),
        ("flat, k in a shard", 0 * normal, 40, 0.5, 0.0, 1.0),
        ("flat, k, p", 0 * normal, 1001, 0.5, 0.0, 1.0),
        ("one survivor", last, 3, 0.5, 0.9, 1.0),
        ("peaked, tail asked for", last, 0, float(np.float32(1 - 2.0**-24)), 0.0, 1.0),
        ("peaked in places", np.where(rng.random(vocab) < 0.01, 9.0, -3.0), 0, 0.9, 0.0, 1.0),
        ("far apart", rng.permutation(vocab) * 64.0, 5, 0.9, 0.5, 1.0),
        ("shards are masked", np.where(ids // (vocab // 8) % 2 == 0, -np.inf, normal), 30, 0.95, 0.0, 1.0),
        ("one shard has all", np.where(ids // (vocab // 8) == 5, normal, -np.inf), 0, 0.95, 0.0, 1.0),
        ("fewer than k", np.where(ids % 50 == 0, normal, -np.inf), 200, 1.0, 0.0, 1.0),
        ("few, none with 64", np.where(ids % 50 == 0, normal, -np.inf), 0, 1 - 1e-6, 0.0, 1.0),
        ("greedy", normal, 500, 0.5, 0.1, 0.0),
    ]
    names, logits, k, p, m, t = (list(a) for a in zip(*rows, strict=True))
    return names, np.stack(logits).astype(np.float32), Options(np.array(t), np.array(k), np.array(p), np.array(m))


def given_to(options: Options, rows: int):
    given = knobs.filters_of(options, rows)
    return given.pop("temperature"), Filters(**given)


def kept_on(mesh, axes, logits, t, filters, **specs):
    """The kept set `[rows, vocab]` that the shards find."""
    def on_shard(x, t, filters):
        return _cut_filters.kept_set(x, t, filters, axes, with_total=False).kept

    rows = specs.get("rows")
    call = jax.shard_map(on_shard, mesh=mesh, in_specs=(P(axes, rows), P(rows), P(rows)), out_specs=P(axes, rows))
    return np.array(jax.jit(call)(jnp.asarray(logits.T), t, filters)).T


@functools.cache
def kept_on_one_device(vocab=VOCAB):
    names, logits, options = rows_of(vocab)
    t, filters = given_to(options, len(names))
    return names, logits, options, np.asarray(jax.jit(kept_set)(jnp.asarray(logits.T), t, filters)).T


def rows_that_differ(kept, want, names):
    return [name for name, a, b in zip(names, kept, want, strict=True) if (a != b).any()]


# The kept set


@pytest.mark.parametrize("shape, names", MESHES.values(), ids=MESHES)
def test_the_kept_set_is_that_of_one_device(shape, names):
    of_rows, logits, options, want = kept_on_one_device()
    axes = ("tp", "data") if names[0] == "tp" and len(names) > 1 else names
    kept = kept_on(meshes.mesh_of(shape, names), axes, logits, *given_to(options, len(of_rows)))
    greedy = of_rows.index("greedy")  # its set is not searched
    assert kept[greedy, logits[greedy].argmax()]
    kept[greedy] = want[greedy]
    assert rows_that_differ(kept, want, of_rows) == []
    knobs.assert_kept(kept, logits.astype(np.float64), options)


@pytest.mark.parametrize("width", [400, 250])
def test_random_rows_and_filters(width):
    """On 4 shards; those of 250 tokens do not start with a group, and keep the same set."""
    rng, rows, vocab, mesh = np.random.default_rng(width), 64, 4 * width, meshes.mesh_of((4,), ("tp",))
    logits = np.stack([knobs.row_of(rng.choice(knobs.KINDS), vocab, rng, exact=False) for _ in range(rows)])
    options = Options(
        rng.choice([0.5, 1.0, 3.0], rows), rng.choice([0, -1, 1, 7, 63, 65, 300, vocab - 1], rows),
        rng.choice([1e-8, 0.3, 0.9, 0.999, 1 - 2.0**-24, 1.0], rows), rng.choice([0.0, 0.0, 1e-8, 0.05, 0.5], rows))
    t, filters = given_to(options, rows)
    kept = kept_on(mesh, ("tp",), logits, t, filters)
    want = np.asarray(jax.jit(kept_set)(jnp.asarray(logits.T), t, filters)).T
    np.testing.assert_array_equal(kept, want)
    knobs.assert_kept(kept, logits.astype(np.float64), options)


@pytest.mark.parametrize("width", [16, 48])
def test_every_prefix_of_narrow_shards(width):
    """top_k = 1, 2, ... as the rows of one call, on tied logits; all tokens of such shards are sent."""
    vocab = 4 * width
    logits = np.tile(np.random.default_rng(width).integers(0, 3, vocab).astype(np.float32), (vocab, 1))
    filters = Filters(jnp.arange(1, vocab + 1), None, None)
    kept = kept_on(meshes.mesh_of((4,), ("tp",)), ("tp",), logits, jnp.ones(vocab), filters)
    for k in range(1, vocab + 1):
        assert sorted(np.flatnonzero(kept[k - 1])) == sorted(oracle.descending(logits[0])[:k])


# Mutations that must be seen


def forget_a_shard(first_tokens):
    def wrong(x, first):
        keys, ids = first_tokens(x, first)
        return jnp.where(first == x.shape[0], _cut_filters.LEAST, keys), ids

    return wrong


def local_ids(first_tokens):
    return lambda x, first: (first_tokens(x, first)[0], first_tokens(x, first)[1] - first)


@pytest.mark.parametrize("mutation, sees", [(forget_a_shard, "k"), (local_ids, "flat, k in a shard")])
def test_mutations_of_what_is_sent_fail(monkeypatch, mutation, sees):
    monkeypatch.setattr(_cut_filters, "first_tokens", mutation(_cut_filters.first_tokens))
    names, logits, options, want = kept_on_one_device()
    kept = kept_on(meshes.mesh_of((4,), ("tp",)), ("tp",), logits, *given_to(options, len(names)))
    assert sees in rows_that_differ(kept, want, names)


def test_mutation_a_head_with_gaps_fails(monkeypatch):
    """All that was sent is taken for the head of the order: rows that need more are wrong."""
    exchange = _cut_filters.exchange

    def wrong(*arguments, **options):
        top, total, head = exchange(*arguments, **options)
        return top, total, head._replace(last=Kept(jnp.full_like(head.last.key, _cut_filters.LEAST), head.last.id))

    monkeypatch.setattr(_cut_filters, "exchange", wrong)
    names, logits, options, want = kept_on_one_device()
    kept = kept_on(meshes.mesh_of((4,), ("tp",)), ("tp",), logits, *given_to(options, len(names)))
    assert {"one more", "p of the search", "ties"} <= set(rows_that_differ(kept, want, names))


# Rounds


def rounds_of(monkeypatch, logits, t, filters, mesh=None, **specs):
    """How many rounds each search takes."""
    found = []

    class Counting:
        def __getattr__(self, name):
            return getattr(lax, name)

        @staticmethod
        def while_loop(is_open, body, start):
            zero = (start[0] & 0)[:1]  # of the type of the state
            n, state = lax.while_loop(lambda s: is_open(s[1]), lambda s: (s[0] + 1, body(s[1])), (zero, start))
            jax.debug.callback(lambda n: found.append(int(n[0])), n)
            return state

    monkeypatch.setattr(_cut_filters, "lax", Counting())
    kept = kept_on(mesh or meshes.mesh_of((4,), ("tp",)), ("tp",), logits, t, filters, **specs)
    jax.effects_barrier()
    monkeypatch.undo()
    return kept, found


def test_no_round_without_need_and_at_most_14(monkeypatch):
    names, logits, options, want = kept_on_one_device()
    t, filters = given_to(options, len(names))
    searched = ["one more", "k V-1", "p of the search", "p 1-1e-6", "k, p, m of the search",
                "k of the search, p not", "ties", "ties of a mass", "flat", "flat, k", "flat, k, p", "peaked, tail asked for",
                "peaked in places", "one shard has all", "fewer than k"]
    settled = np.array([name not in searched for name in names])
    few = jax.tree.map(lambda x: x[settled], (jnp.asarray(logits), t, filters))
    kept, found = rounds_of(monkeypatch, np.asarray(few[0]), *few[1:])
    assert set(found) == {0} and settled.sum() > len(names) // 2 - 2
    kept, found = rounds_of(monkeypatch, logits, t, filters)
    assert set(found) <= {8 + 3, 8 + 4} and found  # 2,176 ids take 3 rounds, 16^3 = 4,096
    assert rows_that_differ(kept, want, [n if n != "greedy" else "" for n in names]) in ([], [""])


def test_rows_of_one_data_shard_alone_are_searched(monkeypatch):
    """The shards of other rows make no round, and nobody waits for them."""
    normal = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    filters = Filters(None, jnp.where(jnp.arange(8) < 4, 0.01, 0.99), None)
    mesh = meshes.mesh_of((2, 4))
    kept, found = rounds_of(monkeypatch, normal, jnp.ones(8), filters, mesh, rows="data")
    assert set(found) == {0, 8 + 3}
    knobs.assert_kept(kept, normal.astype(np.float64), Options(1.0, 0, np.where(np.arange(8) < 4, 0.01, 0.99), 0.0))
