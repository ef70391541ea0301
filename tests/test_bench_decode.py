"""The benchmark of the decode loop at a tiny shape, and what it says of a profile."""

import jax
import numpy as np
import pytest

from benchmarks import bench_decode, records, report
from benchmarks.bench_decode import OURS, SAMPLERS, SAMPLINGS, XLA, Event
from gumbeljax.cli.bench import random_model


def test_a_tiny_cell_is_checked_timed_saved_and_tabled(tmp_path, monkeypatch):
    for name, size in (("PROMPT", 6), ("FEW", 2), ("MANY", 8)):
        monkeypatch.setattr(bench_decode, name, size)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    rows = bench_decode.measure("tiny", random_model("tiny", "float32", 0), 2, list(SAMPLINGS), [OURS, XLA], read_rate=1e9,
                                chunk_size=2, page_size=4, rounds=2, profiles=False)
    assert [row["sampling"] for row in rows] == list(SAMPLINGS)
    for row in rows:
        assert set(row["seconds"]) == {OURS, XLA} and row["attention_difference"] == 0.0
        assert row["ratio"][OURS]["median"] == 1.0
    weights = 1024 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    assert rows[0]["read_bytes"] == 4 * (weights + 2 * 2 * 2 * 16 * 2 * (6 + 5))
    assert bench_decode.table(rows).row_count == 2
    bench_decode.harness.save("decode", rows)
    assert report.decode_times().count("| tiny") == 1


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_contenders_draw_from_the_same_law(sampling):
    h, w = np.random.default_rng(0).normal(size=(1, 16)), np.random.default_rng(1).normal(size=(60, 16)) / 4
    keys = jax.random.split(jax.random.key(0), 32768)
    h, options = np.repeat(h, 32768, 0), SAMPLINGS[sampling]
    counts = [np.bincount(SAMPLERS[name, sampling](h, w, keys, **options), minlength=60) for name in (OURS, XLA)]
    assert 0.5 * np.abs(counts[0] - counts[1]).sum() / 32768 < 0.035  # 0.02 is usual
    if "top_k" in options:
        assert np.array_equal(counts[0] > 0, counts[1] > 0) and 20 < np.sum(counts[0] > 0) < 50


def test_a_breakdown_adds_up():
    """Two steps: a product, a gap, sampling that overlaps a copy to the host; copies and kernels around them do not count."""
    events = [Event("loop_add_fusion", -2, 1), Event("MemcpyD2H", 0, 1), Event("gemm_fusion_dot_1", 10, 4),
              Event("loop_add_fusion_3", 15, 1),
              Event("gumbeljax_race", 16, 4), Event("MemcpyD2H", 18, 1), Event("gemm_fusion_dot_2", 20, 10),
              Event("MemcpyH2D", 40, 1), Event("wrapped_subtract", 42, 1)]
    out = bench_decode.breakdown(events, 2)
    assert out["us_per_step"] == 10 and out["copies_to_host"] == 1
    assert out["busy_us_per_step"] == pytest.approx(19 / 2)
    assert out["us_by_kind"] == {"matrix products": 7, "other kernels": 0.5, "head and sampling": 2, "copy to the host": 0.5}
    assert out["kernels"][0] == {"name": "gemm_fusion_dot", "us_per_step": 7, "per_step": 1}
