"""The tables and plots of the pages are what the JSON says, and nothing else."""

import json

import pytest

from benchmarks import plot, records, report


@pytest.mark.parametrize("path", report.FILES, ids=lambda path: path.name)
def test_pages_say_what_the_results_say(path):
    text = path.read_text(encoding="utf-8")
    assert report.with_tables(text) == text, "run python -m benchmarks.report"


def test_every_table_stands_on_a_page():
    shown = {block["name"] for path in report.FILES for block in report.BLOCK.finditer(path.read_text(encoding="utf-8"))}
    assert shown == set(report.TABLES)


def timings(seconds):
    return {name: {"median": t, "q25": t, "q75": t, "rounds": 3} for name, t in seconds.items()}


def cell(rows, seconds, **more):
    head = {"name": "a head", "vocab": 1000, "d_model": 10}
    return {"head": head, "rows": rows, "implementation": "mosaic", "floor": 1e-5, "seconds": timings(seconds), **more}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A function that writes results/<name>.json of one date."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)

    def write(name, date, rows, platform="gpu"):
        where = {"device": "a GPU", "platform": platform, "cores": 1, "python": "3", "versions": {"x": "1"},
                 "commit": "c" + date, "date": date}
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "environment": where, "rows": rows}))

    return write


def test_ratios_against_every_other(results):
    results("gpu", "2026-01-01", [cell(1, {"sample": 1.04e-5, "categorical": 1e-5, "matmul": 1e-5}),
                                  cell(64, {"sample": 1.1e-5, "categorical": 2e-5, "matmul": 1e-5})])
    results("torch", "2026-01-01", [cell(64, {"matmul": 1e-5, "compiled multinomial": 4e-5, "compiled exponential race": 2.2e-5,
                                              "FlashInfer": 1e-5}, how={"compiled multinomial": "profiler"})])
    lines = report.gpu_ratios().splitlines()
    assert lines[0] == "| head | time of `sample` over | 1 | 64 |"
    assert lines[2:6] == [
        "| a head, 1,000 x 10 | the floor | 1.04 | **1.10** |",
        "|  | XLA `categorical` | **1.04** | 0.55 |",
        "|  | torch, compiled sampler |  | 0.50 |",  # the faster of the two
        "|  | FlashInfer |  | **1.10** |",
    ]
    assert "c2026-01-01" in lines[-1] and "`torch.json`" in lines[-1]
    assert "| a head, 1,000 x 10 | 64 | 10.0 | 40.0* | 22.0 | 10.0 |" in report.torch_times().splitlines()


def test_a_later_run_of_a_cell_counts(results):
    results("gpu", "2026-01-02", [cell(1, {"sample": 1e-5, "matmul": 1e-5})])
    results("gpu-again", "2026-01-03", [cell(1, {"sample": 3e-5, "matmul": 1e-5}, temp_share_of_logits=0.031)])
    results("gpu-old", "2026-01-01", [cell(1, {"sample": 2e-5, "matmul": 1e-5}), cell(8, {"sample": 4e-5, "matmul": 1e-5})])
    table = report.gpu_times()
    assert "| a head, 1,000 x 10 | 1 | mosaic | 30.0 | 10.0 | 10.0 | 3.1% |" in table
    assert "|  | 8 | mosaic | 40.0 | 10.0 | 10.0 |  |" in table
    assert "gpu-again" in table and "gpu-old" in table and "`gpu.json`" not in table  # which had nothing to say


def test_log_prob_has_a_line_for_each_pass(results):
    memory = {"log_prob": 2**20, "jax-cce": 2**30}
    forward = cell(8, {"log_prob": 1.2e-5, "jax-cce": 9e-5, "matmul": 1e-5}, temp_bytes=memory) | {"pass": "forward"}
    backward = cell(8, {"log_prob": 5e-5, "jax-cce": 9e-5}, temp_bytes=memory) | {"pass": "forward + backward"}
    del backward["floor"]
    results("log_prob", "2026-01-01", [forward, backward])
    lines = report.log_prob_times().splitlines()
    assert lines[2] == "| a head, 1,000 x 10 | 8 | forward | 12.0 (1.0) | 90.0 (1024.0) | **1.20** |"
    assert lines[3] == "|  | 8 | forward + backward | 50.0 (1.0) | 90.0 (1024.0) |  |"


def test_what_was_not_measured_is_said(results):
    assert {table() for table in report.TABLES.values()} == {report.NOTHING}


def test_what_make_bench_leaves_is_on_no_page(results):
    results("cpu-here", "2026-01-01", [cell(1, {"sample": 1e-5})], platform="cpu")
    assert report.cpu_times() == report.cpu_ratios() == report.NOTHING


def test_other_text_is_left_alone(results):
    page = "before\n<!-- table gpu-times -->\nold\n<!-- end of table -->\nafter\n"
    assert report.with_tables(page) == page.replace("old", report.NOTHING)


def test_plot_shows_every_contender_and_head(results, tmp_path):
    results("gpu", "2026-01-01", [cell(n, {"sample": 1e-5 * n, "categorical": 2e-5, "matmul": 1e-5}) for n in (1, 4)])
    figure = plot.plot_over_rows(report.plotted(report.gpu_cells()[0]), "a title")
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")}
    assert list(lines) == ["sample", "XLA categorical", "matrix product alone"]
    assert list(lines["sample"]) == pytest.approx([1.0, 4.0]) and list(lines["XLA categorical"]) == pytest.approx([2.0, 2.0])
    figure.savefig(tmp_path / "x.png")


def sharded(devices, rows, seconds, **more):
    one = {"median": 1e-5 * devices / seconds["sample"] / devices}
    return cell(rows, seconds, devices=devices, speedup={"sample": one}, efficiency={"sample": one["median"] / devices},
                collective_bytes={"sample": 20 * rows * devices, "gather logits": 4000 * rows}, **more)


def test_devices_are_lines_and_points(results, tmp_path):
    results("sharded", "2026-01-01", [sharded(1, 64, {"sample": 1e-5, "gather logits": 2e-5}),
                                      sharded(2, 64, {"sample": 0.5e-5, "gather logits": 1e-5})])
    results("sharded-x2", "2026-01-02", [sharded(2, 64, {"sample": 0.625e-5, "gather logits": 1e-5})])
    lines = report.sharded_times().splitlines()
    assert lines[2] == "| a head, 1,000 x 10 | 64 | 1 | 10.0 | 20.0 | 1.00 | 100% | 2.00 | 1,280 | 256,000 |"
    assert lines[3] == "|  |  | 2 | 6.2 | 10.0 | 1.60 | 80% | 1.60 | 2,560 | 256,000 |"
    figure = plot.plot_speedups(report.sharded_rows().rows, report.SAMPLE, report.GATHER, "a title")
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert drawn["sample, 64 rows"] == pytest.approx([1, 1.6]) and drawn["gather logits, 64 rows"] == pytest.approx([0.5, 1])
    figure.savefig(tmp_path / "x.png")


def test_the_bar_of_a_shard_has_microseconds_of_its_own(results):
    row = {"shards": 4, "bar": 1.08e-5 + 6e-6}
    results("shards", "2026-01-01", [cell(1, {"shard": 1.65e-5, "matmul": 1e-5}, **row),
                                     cell(64, {"shard": 1.7e-5, "matmul": 1e-5}, **row)])
    lines = report.shard_times().splitlines()
    assert lines[2:4] == ["| a head, 1,000 x 10 | 1 | 4 | mosaic | 16.5 | 10.0 | 10.0 | 1.05 |",
                          "|  | 64 | 4 | mosaic | 17.0 | 10.0 | 10.0 | **1.10** |"]
