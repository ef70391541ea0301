"""Area M: the machine, the version of JAX, and what is said about them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import gumbeljax
from gumbeljax import _compat, _implementation
from gumbeljax._implementation import DeviceFacts
from tests.cases import routes
from tests.cases.processes import run_python

HOPPER, AMPERE, CPU = DeviceFacts("gpu", (9, 0), 132), DeviceFacts("gpu", (8, 0), 108), DeviceFacts("cpu", (0, 0), 0)

# M-1: a machine with nothing


IMPORT_STARTS_NO_DEVICE = """
import gumbeljax, gumbeljax.reference, gumbeljax.relaxation, jax
jax.config.update("jax_num_cpu_devices", 3)  # an error once a device has been started
jax.config.update("jax_enable_x64", True)
assert len(jax.devices()) == 3
import sys
assert "flax" not in sys.modules and "torch" not in sys.modules
"""

EVERY_ENTRY_POINT = """
import jax, jax.numpy as jnp, numpy as np, gumbeljax
h, w, key = jnp.ones((3, 16)), jnp.asarray(np.arange(640).reshape(40, 16) % 7, jnp.float32), jax.random.key(0)
options = {"temperature": np.float64(0.5), "logit_bias": {3: 1.0}, "mask": np.ones(40, bool)}
gumbeljax.sample(h, w, key)
gumbeljax.sample(np.ones((3, 16)), np.ones((40, 16)), np.asarray(jax.random.PRNGKey(0)), **options)
for more in ({"num_samples": 2}, {"num_samples": 2, "replace": False}, {"method": "categorical"}):
    gumbeljax.sample_with_log_probs(h, w, key, **options, **more)
gumbeljax.sample_logits(h.astype(jnp.bfloat16), key, temperature=0.0)
tokens = gumbeljax.greedy(h.astype(jnp.float16), w, valid_vocab=30)
jax.grad(lambda h: gumbeljax.log_prob(h, w, tokens, temperature=2).sum())(h)
print(gumbeljax.choose_implementation(h, w))
"""


def test_import_starts_no_device():
    run_python("-c", IMPORT_STARTS_NO_DEVICE)


def test_every_entry_point_without_a_warning():
    """And without a GPU, its plugin or Triton."""
    assert run_python("-c", EVERY_ENTRY_POINT).strip() == "xla"


def test_debug_nans_finds_none_in_a_draw():
    with jax.debug_nans(True):
        assert (gumbeljax.sample(jnp.ones((5, 16)), jnp.ones((43, 16)), jax.random.key(0)) >= 0).all()


# M-3: the deprecated backend


@routes.needs_triton
def test_lowering_a_kernel_warns_of_nothing():
    """The deprecation of Pallas' Triton backend is for us to read, not for users."""
    stages = _implementation.stages("triton", HOPPER)
    shape = jax.ShapeDtypeStruct
    h, w, t = shape((4, 64), jnp.float32), shape((100, 64), jnp.float32), shape((4,), jnp.float32)
    words = (shape((4,), jnp.uint32),) * 2

    def everything(h, w, words, t):
        # Where the library does it: as a call is traced.
        fresh = _implementation.stages("triton", HOPPER)
        return fresh.draw(h, w, words, t, vocab=100), fresh.mass(h, w, t, vocab=100), fresh.groups(h, w, t, vocab=100)

    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        text = jax.jit(everything).trace(h, w, words, t).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text and stages.draw is not None


def operands(rows=4, dtype=jnp.bfloat16):
    return jnp.zeros((rows, 64), dtype), jnp.zeros((80, 64), dtype)


def test_without_the_backend_there_is_one_warning_and_another_implementation(monkeypatch):
    monkeypatch.setattr(_compat, "pallas_triton", lambda: None)
    h, w = operands()
    with pytest.warns(
        UserWarning, match=r"has no Pallas Triton backend; gumbeljax runs implementation='xla' instead\.$"
    ) as seen:
        assert _implementation.choose(h, w, None, AMPERE) == "xla"
    assert len(seen) == 1
    with pytest.raises(NotImplementedError, match=r"'triton' cannot run this call: jax .* has no Pallas Triton backend"):
        _implementation.choose(h, w, "triton", AMPERE)
    with warnings.catch_warnings():  # and on a machine that would not use it, nothing is said
        warnings.simplefilter("error")
        assert _implementation.choose(h, w, None, CPU) == "xla"


# M-6: named and not available


@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_a_named_backend_never_falls_back(name):
    if jax.default_backend() != "cpu":
        pytest.skip("this machine has what is missing here")
    h, w = operands()
    sentence = rf"^implementation='{name}' cannot run this call: it needs an NVIDIA GPU, and this call runs on cpu; leave "
    key, tokens = jax.random.key(0), jnp.zeros(4, jnp.int32)
    for call in (
        lambda: gumbeljax.sample(h, w, key, implementation=name),
        lambda: gumbeljax.greedy(h, w, implementation=name),
        lambda: gumbeljax.sample(h[:0], w, key, implementation=name),
        lambda: gumbeljax.sample(h, w, key, implementation=name, method="categorical"),
        lambda: gumbeljax.sample_with_log_probs(h, w, key, implementation=name, num_samples=2),
        lambda: gumbeljax.log_prob(h, w, tokens, implementation=name),
        lambda: gumbeljax.choose_implementation(h, w, name),
        lambda: jax.jit(lambda h: gumbeljax.sample(h, w, key, implementation=name))(h),
        lambda: jax.vmap(lambda h: gumbeljax.sample(h, w, key, implementation=name))(h),
    ):
        with pytest.raises(NotImplementedError, match=sentence):
            call()


def test_the_choice_is_public_and_is_what_runs():
    h, w = operands()
    assert gumbeljax.choose_implementation(h, w) == "xla" if jax.default_backend() == "cpu" else True
    assert gumbeljax.choose_implementation(np.asarray(h), w, "xla") == "xla"
    assert jax.jit(lambda h: len(gumbeljax.choose_implementation(h, w)))(h) > 0  # of a tracer too
    with pytest.raises(ValueError, match=r"implementation must be one of None, 'xla', 'triton', 'mosaic'; got 'cuda'"):
        gumbeljax.choose_implementation(h, w, "cuda")


@routes.needs_triton
def test_the_choice_on_other_machines():
    few, many = operands(4), operands(256)
    assert _implementation.choose(*few, None, AMPERE) == _implementation.choose(*many, None, AMPERE) == "triton"
    assert _implementation.choose(*few, None, DeviceFacts("gpu", (0, 0), 0)) == "xla"  # not NVIDIA's
    assert _implementation.choose(*few, None, DeviceFacts("tpu", (0, 0), 0)) == "xla"
    if _compat.pallas_mosaic() is not None:
        assert _implementation.choose(*few, None, HOPPER) == _implementation.choose(*many, None, HOPPER) == "mosaic"
        assert _implementation.choose(*many, None, HOPPER, groups=True) == "triton"
        with pytest.raises(NotImplementedError, match=r"'mosaic' cannot run this call: it draws one token per row"):
            _implementation.choose(*many, "mosaic", HOPPER, groups=True)
        with pytest.raises(NotImplementedError, match=r"'mosaic' cannot run this call: it multiplies bfloat16 or float16"):
            _implementation.choose(*operands(dtype=jnp.float32), "mosaic", HOPPER)
    with pytest.raises(NotImplementedError, match=r"it needs a Hopper GPU, and this one has compute capability 8\.0"):
        _implementation.choose(*many, "mosaic", AMPERE)


def test_an_old_jax_is_refused_by_name():
    with pytest.raises(
        ImportError, match=r"^gumbeljax needs jax >= 0\.11\.2; got 0\.9\.9: upgrade it with pip install -U jax\.$"
    ):
        _compat.check_jax_version("0.9.9")
    for version in ("0.11.2", "0.12.0.1", "0.12.0", "1.0.0", "0.11.3.dev20260101", jax.__version__):
        _compat.check_jax_version(version)
    with pytest.raises(ImportError, match=r"got 0\.11\.1"):
        _compat.check_jax_version("0.11.1")


def test_rank_promotion_may_be_forbidden():
    """A user's `jax_numpy_rank_promotion="raise"` is about the user's own code."""
    h, w, key = jnp.ones((2, 16)), jnp.ones((100, 16)), jax.random.key(0)
    with jax.numpy_rank_promotion("raise"):
        for options in ({}, {"num_samples": 3}, {"num_samples": 3, "replace": False}, {"method": "categorical"}):
            assert (gumbeljax.sample(h, w, key, **options) >= 0).all()
        assert gumbeljax.greedy(h, w).tolist() == [0, 0]
        grad = jax.grad(lambda h: gumbeljax.log_prob(h, w, jnp.array([1, 2])).sum())(h)
        assert np.isfinite(grad).all()
