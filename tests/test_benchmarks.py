"""The benchmarks' own promises: what is timed is not dropped, the law is checked first, results survive the disk."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import gumbeljax
from benchmarks import (
    bench_cpu,
    bench_gpu,
    bench_log_prob,
    bench_resampling,
    bench_sharded,
    bench_shards,
    bench_verify,
    harness,
    plot,
    records,
    timing,
)
from benchmarks.shapes import CPU_HEADS, GPU_HEADS, HEADS, ODD, Head


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


def test_a_loop_copies_no_constant(monkeypatch):
    """Arrays that the loop only reads are not among what it returns, or XLA copies them once a call."""
    compiled = []
    jit = jax.jit

    def recorded(f, **options):
        compiled.append(jit(f, **options))
        return compiled[-1]

    monkeypatch.setattr(jax, "jit", recorded)
    h, w = jnp.ones((8, 64)), jnp.ones((4096, 64))
    harness.jitted_loop(lambda h, w: harness.depend(h, h @ w.T), h, w, iterations=3)
    text = compiled[0].lower(h, w).compile().as_text()
    assert "4096,64" in text and not any("4096,64" in line for line in text.splitlines() if " copy(" in line)


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


def test_floor_is_the_product_or_the_best_read_rate_of_the_run():
    def cell(num_bytes, matmul):
        return {"bytes_of_w": num_bytes, "seconds": {bench_gpu.MATMUL: {"median": matmul}}}

    few, many = bench_gpu.with_floors([cell(100, 2.0), cell(100, 5.0)], 40.0)
    assert (few["floor"], many["floor"]) == (2.5, 5.0) and few["read_rate"] == 40.0


def test_calls_per_loop_fill_the_time():
    assert timing.calls_per_loop(4 * 10**9, 0) == 15  # 1 ms each
    assert timing.calls_per_loop(4 * 10**9, 12 * 10**11) == 8  # 2 ms each, of products


def test_gpu_cells_compare_tokens_and_report_memory(monkeypatch):
    monkeypatch.setattr(timing, "calls_per_loop", lambda *_, **__: 2)
    w, exact_w = bench_gpu.random_head(ODD), bench_gpu.exact_head(ODD)
    names = [bench_gpu.SAMPLE, bench_gpu.LOW, bench_gpu.ARGMAX, bench_gpu.MATMUL]
    row = bench_gpu.measure(ODD, 4, bench_gpu.compile_cells(ODD, [4], w, names)[4], exact_w, rounds=2)
    assert bench_gpu.table(bench_gpu.with_floors([row], bench_gpu.best_read_rate(w, rounds=2))).row_count == 1
    assert list(row["seconds"]) == names and row["temp_bytes"] > 0 and row["tokens_compared"] == 4
    monkeypatch.setattr(bench_gpu.gumbeljax, "sample", lambda h, w, key, implementation=None: jnp.argmax(
        h @ w.T, axis=-1) + (implementation == "xla"))
    with pytest.raises(SystemExit, match="tokens differ"):
        bench_gpu.measure(ODD, 4, bench_gpu.compile_cells(ODD, [4], w, names)[4], exact_w, rounds=2)


def test_exact_heads_are_exact():
    logits = bench_gpu.exact_states(ODD, 8).astype(jnp.float32) @ bench_gpu.exact_head(ODD).astype(jnp.float32).T
    quanta = logits * 2.0**10
    assert (quanta == jnp.round(quanta)).all() and float(jnp.std(logits)) > 0.5


def test_wrong_gradients_are_not_timed(monkeypatch):
    x = bench_log_prob.inputs(ODD, 8, bench_gpu.random_head(ODD))
    errors = bench_log_prob.check(x, [bench_log_prob.OURS, bench_log_prob.PLAIN])
    assert errors[bench_log_prob.PLAIN] == 0 < errors[bench_log_prob.OURS] < 0.01
    monkeypatch.setitem(bench_log_prob.LOSSES, "half", lambda h, w, tokens: jax.lax.stop_gradient(
        bench_log_prob.LOSSES[bench_log_prob.PLAIN](h, w, tokens)))
    with pytest.raises(SystemExit, match="half"):
        bench_log_prob.check(x, ["half", bench_log_prob.PLAIN])


def test_log_prob_cells_have_both_passes(monkeypatch):
    monkeypatch.setattr(timing, "calls_per_loop", lambda *_, **__: 2)
    names = [bench_log_prob.OURS, bench_log_prob.PLAIN]
    rows = bench_log_prob.measure(ODD, 4, bench_gpu.random_head(ODD), names, rounds=2, read_rate=1e9)
    assert [row["pass"] for row in rows] == [bench_log_prob.FORWARD, bench_log_prob.BACKWARD]
    assert bench_log_prob.table(rows, names).row_count == 2 and all(row["temp_bytes"][names[0]] > 0 for row in rows)


@pytest.mark.parametrize("name", ["timing", "records", "shapes", "bench_torch"])
def test_the_other_side_is_timed_without_jax(name):
    tree = ast.parse((Path(records.__file__).parent / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(module.split(".")[0] in ("jax", "gumbeljax") or module == "benchmarks.harness" for module in imported)


def test_peers_laws_are_checked_before_timing(monkeypatch):
    torch = pytest.importorskip("torch")
    from benchmarks import bench_torch

    def sampler(scale):
        return lambda h, w, i: torch.multinomial(torch.softmax(scale * bench_torch.logits_f32(h, w), -1), 1)[:, 0]

    for name, scale in (("right", 1.0), ("cold", 1.2)):
        monkeypatch.setitem(bench_torch.CONTENDERS, name, bench_torch.Contender(sampler(scale), bench_torch.logits_f32))
    h, w = bench_torch.inputs(ODD, 1, "cpu")
    assert bench_torch.check_law("right", h, w) > 1e-6
    with pytest.raises(SystemExit, match="cold does not draw"):
        bench_torch.check_law("cold", h, w)


def test_head_names_are_unique():
    assert len({head.name for head in HEADS}) == len(HEADS) and {*CPU_HEADS, *GPU_HEADS} <= set(HEADS)


def test_verification_is_checked_before_it_is_timed():
    """The laws overlap as asked for, both ways accept as often as they should, and drafts of another law are noticed."""
    w = bench_gpu.random_head(Head("small", 2048, 64))
    x = bench_verify.inputs(w, w[:, :32], bench_verify.noise_for(0.5), rows=8, draft_len=2)
    seen = bench_verify.check(x)
    assert abs(seen["acceptance"] - 0.5) < 0.05 and 0 < seen["rejected_rows"] <= 8
    _, accepted = jax.lax.map(lambda drafts: bench_verify.idiom(x, *drafts), (x.drafted, x.keys))
    assert abs(float((accepted > 0).mean()) - seen["first_expected"]) < 0.1
    with pytest.raises(SystemExit, match="nothing was timed"):
        bench_verify.check(x._replace(drafted=jnp.broadcast_to(gumbeljax.greedy(x.h[:, :-1], w), x.drafted.shape)))


def test_resampling_is_checked_before_it_is_timed():
    log_weights = jax.random.normal(jax.random.key(1), (64, 32)).at[:, ::7].set(-jnp.inf)
    drawn = bench_resampling.plain_systematic(log_weights, jax.random.key(2))
    for name in bench_resampling.BASE:
        bench_resampling.check(name, log_weights, bench_resampling.CONTENDERS[name](log_weights, jax.random.key(2)))
    for wrong in (drawn - 1, jnp.roll(drawn, 1, axis=0), jnp.broadcast_to(jnp.arange(32), drawn.shape)):
        with pytest.raises(SystemExit, match="nothing was timed"):
            bench_resampling.check("systematic", log_weights, wrong)


def small_mesh_rows(monkeypatch, **replaced):
    for name, function in replaced.items():
        monkeypatch.setitem(bench_sharded.ON_SHARD, name, function)
    head = Head("small", 2048, 64)
    return next(bench_sharded.of_head(head, [4], [1, 2, 4], list(bench_sharded.CONTENDERS), rounds=2, iterations=2))


def test_cells_of_a_mesh_count_what_moves(monkeypatch):
    rows = small_mesh_rows(monkeypatch)
    assert [row["devices"] for row in rows] == [1, 2, 4] and bench_sharded.table(rows).row_count == 3
    for row in rows:
        n, moved = row["devices"], row["collective_bytes"]
        assert moved[bench_sharded.SAMPLE] == (20 * 4 * n if n > 1 else 0) and row["efficiency"][bench_sharded.SAMPLE] > 0
        assert moved[bench_sharded.GATHER] == 2 * moved[bench_sharded.GATHER_16] == (4 * 4 * 2048 if n > 1 else 0)


def test_other_tokens_than_on_one_device_are_not_timed(monkeypatch):
    def local(x, axis):  # every shard draws on its own, and the first ones' tokens are taken for those of all
        tokens = gumbeljax.sample(x.h, x.w, x.keys, axis_name=())
        return tokens if axis is None else jax.lax.pmax(tokens, axis)

    with pytest.raises(SystemExit, match="nothing was timed"):
        small_mesh_rows(monkeypatch, **{bench_sharded.SAMPLE: local})


def test_a_shard_alone_is_checked_and_timed(monkeypatch):
    head = Head("small", 2048, 64)
    rows = list(bench_shards.of_head(head, [1, 4], [2, 4], rounds=2, iterations=2))
    assert [(row["shards"], row["rows"]) for row in rows] == [(2, 1), (2, 4), (4, 1), (4, 4)]
    assert bench_shards.table(rows).row_count == 4 and rows[0]["bytes_of_w"] == 2 * 64 * 2048 // 2
    assert all(row["bar"] == 1.08 * row["floor"] + 6e-6 and row["floor"] >= row["seconds"]["matmul"]["median"] for row in rows)
    monkeypatch.setattr(bench_shards, "work", lambda x, shards: gumbeljax.greedy(x.h, x.w))
    with pytest.raises(SystemExit, match="tokens differ"):
        next(bench_shards.of_head(head, [4], [2], rounds=2, iterations=2))
