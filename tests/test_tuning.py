"""Tables of measured choices: they decide what runs, never which token is drawn."""

import itertools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gumbeljax
from gumbeljax import TunedShape, Tuning, _call, _compat, _implementation, _tuning, autotuning
from gumbeljax._implementation import DeviceFacts, Plan
from gumbeljax._tuning import Place
from pallas_kernels import mosaic_tiles, triton
from pallas_kernels.tiles import MosaicTiles, TritonTiles, XlaTiles
from tests import heads

VOCAB, D_MODEL = 203, 40
needs_triton = pytest.mark.skipif(_compat.pallas_triton() is None, reason="this jax has no Pallas Triton backend")
HOPPER = DeviceFacts("gpu", (9, 0), 132, "NVIDIA H200")


def place(rows=17, *, device=None, dtype="float32", vocab=VOCAB, vocab_axis=0, d_model=D_MODEL):
    return Place(device or jax.devices()[0].device_kind, rows, d_model, vocab, dtype, vocab_axis)


def choice(tiles, at=None):
    name = {XlaTiles: "xla", TritonTiles: "triton", MosaicTiles: "mosaic"}[type(tiles)]
    return TunedShape(at or place(), name, tiles, 1.0, 2.0)


def blocks(block: int) -> Tuning:
    return Tuning((choice(XlaTiles(block)),))


@pytest.fixture
def head():
    h, w = heads.exact_head(VOCAB, D_MODEL, 17)
    return jnp.asarray(h), jnp.asarray(w)


def tiles_of(h, w, implementation, **options):
    return _call.prepare(h, w, implementation=implementation, **options)[1].tiles


@pytest.mark.parametrize("block", [16, 64, 160, 256])
def test_a_choice_is_what_runs_and_draws_the_same_tokens(head, block):
    tuning, key = blocks(block), jax.random.key(0)
    assert tiles_of(*head, tuning) == XlaTiles(block)
    text = str(jax.make_jaxpr(lambda h, w: gumbeljax.sample(h, w, key, implementation=tuning))(*head))
    assert (f"{block},17]" in text) == (block < VOCAB)  # logits of one block
    assert (f"{VOCAB},17]" in text) == (block > VOCAB)
    np.testing.assert_array_equal(gumbeljax.sample(*head, key, implementation=tuning), gumbeljax.sample(*head, key))


def test_every_entry_point_takes_a_table(head):
    tuning, key = blocks(48), jax.random.key(1)
    plain, tuned = (gumbeljax.sample_with_log_probs(*head, key, temperature=0.7, implementation=x) for x in (None, tuning))
    np.testing.assert_array_equal(plain.token, tuned.token)
    np.testing.assert_allclose(plain.tempered_log_prob, tuned.tempered_log_prob, atol=1e-5)
    np.testing.assert_array_equal(gumbeljax.greedy(*head, implementation=tuning), gumbeljax.greedy(*head))
    score = lambda x: gumbeljax.log_prob(*head, plain.token, implementation=x)  # noqa: E731
    np.testing.assert_allclose(score(tuning), score(None), atol=1e-5)
    for options in ({"num_samples": 3}, {"method": "categorical"}):
        draws = (gumbeljax.sample(*head, key, implementation=x, **options) for x in (None, tuning))
        np.testing.assert_array_equal(*draws)


def test_another_table_is_another_program(head):
    traced = []

    def draw(h, w, tuning):
        traced.append(tuning)
        return gumbeljax.sample(h, w, jax.random.key(0), implementation=tuning)

    jitted = jax.jit(draw, static_argnames="tuning")
    for tuning in (blocks(16), blocks(16), blocks(32), blocks(16)):
        jitted(*head, tuning=tuning)
    assert traced == [blocks(16), blocks(32)]
    configs = {_call.prepare(*head, implementation=tuning)[1] for tuning in (blocks(16), blocks(32), None)}
    assert len(configs) == 3  # what compiled functions are kept by


def test_a_choice_holds_for_fewer_rows_of_its_own_head_alone():
    small, large = choice(XlaTiles(16), place(16)), choice(XlaTiles(64), place(64))
    tuning = Tuning((large, small))
    found = {rows: tuning.find(place(rows)) for rows in (1, 16, 17, 64, 65)}
    assert found == {1: small, 16: small, 17: large, 64: large, 65: None}
    others = {"device": "NVIDIA L4", "dtype": "bfloat16", "vocab": VOCAB + 1, "vocab_axis": 1, "d_model": D_MODEL + 1}
    for name, value in others.items():
        assert tuning.find(place(1, **{name: value})) is None


def test_a_shape_that_is_not_there_runs_by_rule(head):
    h, w = head
    tuning = blocks(16)
    assert tiles_of(h[:3], w, tuning) == XlaTiles(16)
    for a, b, options in ((jnp.tile(h, (2, 1)), w, {}), (h, w[:-1], {}), (h.astype(jnp.bfloat16), w.astype(jnp.bfloat16), {}),
                          (h, w.T, {"vocab_axis": 1})):
        assert tiles_of(a, b, tuning, **options) is None
    assert tiles_of(h, w, "xla") is None
    assert tiles_of(h, w, tuning, valid_vocab=100) == XlaTiles(16)  # padding is a part of the table


@needs_triton
def test_a_choice_that_cannot_run_a_call_is_passed_over():
    h, w = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((512, 128), jnp.bfloat16)
    at = Place(HOPPER.kind, 64, 128, 512, "bfloat16", 0)
    tuning = Tuning((choice(MosaicTiles(vocab=128), at),))
    plan = lambda *a, **k: _implementation.plan(h, w, *a, HOPPER, **k)  # noqa: E731
    if _compat.pallas_mosaic() is not None:
        assert plan(tuning) == Plan("mosaic", MosaicTiles(vocab=128)) and plan(None) == Plan("mosaic")
    assert plan(tuning, groups=True) == Plan("triton") and plan(tuning, filters=True) == Plan("xla")
    assert plan(tuning, filters=True, one_draw=True) == Plan("triton")


@needs_triton
def test_tiles_reach_the_kernel():
    at = Place(HOPPER.kind, 4, 128, 512, "bfloat16", 0)
    h, w = jax.ShapeDtypeStruct((4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)

    def lowered(implementation):
        mesh = AbstractMesh((), (), abstract_device=AbstractDevice(HOPPER.kind, 132, "gpu"))
        with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draw = jax.jit(lambda h, w, key: gumbeljax.sample(h, w, key, implementation=implementation))
            return draw.trace(h, w, jax.random.key(0)).lower(lowering_platforms=("cuda",)).as_text()

    rule = triton.default_tiles(4, 128, jnp.bfloat16, jnp.bfloat16)
    texts = [lowered(Tuning((choice(tiles, at),))) for tiles in (rule, TritonTiles(32, 16, 64, num_warps=2, num_stages=3))]
    assert texts[0] == lowered("triton")
    assert "num_warps = 2" in texts[1] and "tensor<16x4xf32>" in texts[1]  # 512 / 32 tiles of the vocabulary
    assert "num_warps = 2" not in texts[0] and "tensor<16x4xf32>" not in texts[0]


def test_our_own_tables_come_after_the_users(head, tmp_path, monkeypatch):
    gumbeljax.save_tuning(Tuning((choice(XlaTiles(32)), choice(XlaTiles(48), place(99)))), tmp_path / "a.json")
    monkeypatch.setattr(_tuning, "BUILT_IN", tmp_path)
    _tuning.built_in.cache_clear()
    try:
        h, w = head
        assert tiles_of(h, w, None) == tiles_of(h, w, "xla") == XlaTiles(32)
        assert tiles_of(jnp.tile(h, (2, 1)), w, blocks(16)) == XlaTiles(48)
        assert tiles_of(h, w, blocks(16)) == XlaTiles(16)
    finally:
        _tuning.built_in.cache_clear()


def test_the_tables_of_the_package_can_be_read():
    for path in _tuning.BUILT_IN.glob("*.json"):
        table = gumbeljax.load_tuning(path)
        assert table.shapes and table.command  # measured, and how
    assert isinstance(_tuning.built_in(), Tuning)


def test_files_keep_every_field(tmp_path):
    path = tmp_path / "tuning.json"
    tiles = (XlaTiles(64), TritonTiles(32, 16, 64, 8, 2), MosaicTiles(True, 128, 64, 5, True))
    tuning = Tuning(tuple(choice(x, place(i + 1, device="a GPU")) for i, x in enumerate(tiles)), "how")
    gumbeljax.save_tuning(tuning, path)
    assert gumbeljax.load_tuning(path) == tuning and json.loads(path.read_text())["jax"] == jax.__version__


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"command": "", "shapes": [{"device": "cpu"}]}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"path must be a file that gumbeljax\.autotune of this version wrote"):
        gumbeljax.load_tuning(tmp_path / "x.json")


@pytest.mark.parametrize("name,error", [("none.json", FileNotFoundError), ("", IsADirectoryError)])
def test_a_table_that_is_not_there(tmp_path, name, error):
    with pytest.raises(error, match=r"^path must be a file that gumbeljax\.autotune wrote; got '.*', where reading says .*\.$"):
        gumbeljax.load_tuning(tmp_path / name)


def test_tiles_of_another_version_are_refused(tmp_path):
    path = tmp_path / "x.json"
    gumbeljax.save_tuning(Tuning((choice(XlaTiles(16), place(4)),)), path)
    path.write_text(path.read_text().replace('"rows": 4', '"rows": "4"'))
    with pytest.raises(ValueError, match="rows must be of type int, got '4'"):  # it would break the first draw
        gumbeljax.load_tuning(path)
    gumbeljax.save_tuning(blocks(16), path)
    path.write_text(path.read_text().replace('"block"', '"chunk"'))
    with pytest.raises(ValueError, match="chunk"):
        gumbeljax.load_tuning(path)
    path.write_text(path.read_text().replace('"chunk": 16', '"block": 17'))
    with pytest.raises(ValueError, match="multiple of 16"):
        gumbeljax.load_tuning(path)
    gumbeljax.save_tuning(Tuning((choice(MosaicTiles(vocab=128), place(4)),)), path)
    path.write_text(path.read_text().replace('"vocab": 128', '"vocab": 256'))
    with pytest.raises(ValueError, match="a multiple of 16 and at most 144; got 256"):  # this kernel would lose logits
        gumbeljax.load_tuning(path)


@pytest.mark.filterwarnings("ignore:autotune passed over")
def test_the_fastest_that_is_right_is_kept(head, tmp_path, monkeypatch):
    """With a clock of our own: 64 is fastest but draws wrong tokens, 80 does not compile, 32 is the best of the rest."""
    times = {None: 1.0, "xla": 1.0, 16: 0.8, 32: 0.5, 64: 0.1, 96: 0.6}
    tried = [autotuning.Candidate("xla", XlaTiles(block)) for block in (16, 32, 64, 80, 96)]
    monkeypatch.setattr(autotuning, "candidates", lambda *_: tried)

    def timed_loop(draw, h, w, keys, iterations):
        wanted = draw.keywords["implementation"]
        block = tiles_of(h, w, wanted).block if isinstance(wanted, Tuning) else wanted
        if block == 80:
            raise RuntimeError("out of shared memory")
        return lambda: times[block], np.full(len(h), block == 64)

    monkeypatch.setattr(autotuning, "timed_loop", timed_loop)
    path = tmp_path / "tuning.json"
    with pytest.warns(UserWarning, match=r"passed over 2 of 5 candidates.*block=64.*other tokens"):
        kept = gumbeljax.autotune(*head, path, rounds=2, command="made so").shapes
    assert kept == (TunedShape(place(), "xla", XlaTiles(32), 0.5, 1.0),)
    times[32] = 0.995  # within noise of the rule
    times[16] = times[96] = 2.0
    assert gumbeljax.autotune(*head, rounds=2).shapes == ()
    other = gumbeljax.autotune(head[0][:4], head[1], path, rounds=2)
    assert [x.place.rows for x in other.shapes] == [17] and other.command == "made so"
    assert gumbeljax.autotune(*head, path, rounds=2).shapes == () == gumbeljax.load_tuning(path).shapes  # an old choice goes


def test_a_real_measurement(head):
    tuning = gumbeljax.autotune(*head, rounds=2)
    assert len(tuning.shapes) <= 1
    np.testing.assert_array_equal(gumbeljax.sample(*head, jax.random.key(0), implementation=tuning),
                                  gumbeljax.sample(*head, jax.random.key(0)))


def test_nothing_is_measured_inside_jit(head):
    with pytest.raises(TypeError, match="h must be a concrete array"):
        jax.jit(lambda h, w: gumbeljax.autotune(h, w) and h)(*head)


def test_candidates_start_from_the_rules():
    rule = triton.default_tiles(16, 4096, jnp.bfloat16, jnp.bfloat16)
    near = list(dict.fromkeys(autotuning.near_triton(rule, jnp.bfloat16, jnp.bfloat16)))
    assert near[0] == rule and 10 < len(near) < 40
    for rows, axis, shards in itertools.product((33, 128, 256), (0, 1), (1, 8)):
        rule = mosaic_tiles.choose_tiles(rows, 151_936 // shards, axis)
        assert axis == 0 or rule.vocab % 64 == 0
        near = list(dict.fromkeys(autotuning.near_mosaic(rule, 4096)))
        assert near[0] == rule and 5 < len(near) < 40
    for rows, d_model in itertools.product((1, 33, 128, 256), (2880, 4096)):
        rule = mosaic_tiles.choose_tiles(rows, 151_936, itemsize=1, d_model=d_model)
        assert d_model % rule.d_model == 0 and rule.steps >= 5
        near = list(dict.fromkeys(autotuning.near_mosaic(rule, d_model, 1)))
        assert near[0] == rule and all(d_model % tiles.d_model == 0 for tiles in near)


def test_a_table_goes_along_on_a_mesh(head):
    h, w = head
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        on_mesh = jax.device_put(h, NamedSharding(mesh, P("x")))
        drawn = gumbeljax.sample(on_mesh, w, jax.random.key(0), implementation=blocks(16))
    np.testing.assert_array_equal(drawn, gumbeljax.sample(h, w, jax.random.key(0)))
