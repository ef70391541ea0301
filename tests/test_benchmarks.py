"""The benchmarks' own promises: what is timed is not dropped, the law is checked first, results survive the disk."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import bench_cpu, harness, plot, records, timing
from benchmarks.shapes import CPU_HEADS, HEADS, ODD


def test_depend_keeps_the_work_alive():
    h, w = jnp.ones((8, 64)), jnp.ones((512, 64))

    def compiled(step):
        return jax.jit(step).lower(h, w).compile().cost_analysis().get("flops", 0)

    product = 2 * 8 * 64 * 512
    assert compiled(lambda h, w: harness.depend(h, h @ w.T)) >= product
    assert compiled(lambda h, w: (h @ w.T, h)[1]) < product  # what nothing reads, XLA drops


def test_depend_changes_no_value():
    x = jnp.asarray([1.0, -2.0, 3e-3])
    assert (harness.depend(x, jnp.asarray([151_935, -1])) == x).all()


def test_time_inside_jit_runs_every_iteration():
    ran = []

    def step(count):
        jax.debug.callback(lambda c: ran.append(int(c)), count, ordered=True)
        return count + 1

    seconds = harness.time_inside_jit(step, jnp.int32(0), iterations=5, rounds=2)
    jax.effects_barrier()
    assert ran == [0, 1, 2, 3, 4] * 3  # one round to compile
    assert len(seconds) == 2 and min(seconds) > 0


def test_interleave_gives_every_contender_every_round():
    calls = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    samples = harness.interleave(contenders, rounds=6, min_time=0)
    assert {name: len(s) for name, s in samples.items()} == dict.fromkeys("abc", 6)
    turns = [tuple(calls[i : i + 3]) for i in range(len(calls) - 18, len(calls), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1  # the order changes


def test_ratio_is_taken_round_by_round():
    # A machine that is three times slower in the last round moves no ratio.
    assert timing.ratio([2.0, 2.0, 6.0], [1.0, 1.0, 3.0])[:3] == (2.0, 2.0, 2.0)


def test_laws_are_checked_before_timing():
    h, w = bench_cpu.make_inputs(ODD, 8)
    assert bench_cpu.check_same_tokens(h, w, num_keys=2) == 32
    assert bench_cpu.check_law(ODD, num_draws=1024) > 1e-4


def test_a_wrong_law_is_not_timed():
    def cooler(h, w, key, **options):
        return jax.vmap(lambda k, x: jax.random.categorical(k, 1.2 * x))(key, h @ w.T)

    def other_key(h, w, key, *, mode, **options):
        return jax.random.categorical(jax.random.fold_in(key, 1), h @ w.T, mode=mode)

    with pytest.raises(SystemExit, match="chi-square"):
        bench_cpu.check_law(ODD, cooler)
    with pytest.raises(SystemExit, match="differs from categorical"):
        bench_cpu.check_same_tokens(*bench_cpu.make_inputs(ODD, 8), other_key)


def test_results_are_saved_tabled_and_plotted(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    row = bench_cpu.measure(ODD, 1, rounds=3)
    assert bench_cpu.table([row]).row_count == 1
    harness.save("small", [row], base=bench_cpu.LOW)
    result = records.load("small")
    assert result["rows"] == [row] and result["environment"]["versions"]["jax"] == jax.__version__
    plot.plot_ratios(result).savefig(tmp_path / "small.png")
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


def test_head_names_are_unique():
    assert len({head.name for head in HEADS}) == len(HEADS) and set(CPU_HEADS) <= set(HEADS)
