"""The counts in docs/sharding.md are those of the code."""

import itertools
import re
from pathlib import Path

from benchmarks.sharding_model import bytes_received, waves

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")


def test_the_tables_of_the_page():
    rows = re.findall(r"^\| (\d) \| ([\d,]+) \| (\d) \| (\d+)% \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for shards, tiles, turns, busy in rows:
        counted = waves(151_936, int(shards), 64)
        assert (int(tiles.replace(",", "")), int(turns), int(busy)) == (counted.tiles, counted.waves, round(100 * counted.busy))
    assert f"{round(bytes_received(256, 8) / 1000)} kB" in PAGE
    assert f"{round(4 * 256 * 151_936 * 7 / 8 / 1e6)} MB" in PAGE
    assert [waves(151_936, n, 256).tiles for n in (1, 2, 4, 8)] == [2_374, 1_188, 528, 264]


def test_more_devices_never_have_more_turns_and_all_are_kept_busy():
    for vocab in (151_936, 128_256):
        for rows in (1, 64, 128, 256):
            found = [waves(vocab, n, rows) for n in (1, 2, 4, 8)]
            assert all(a.waves >= b.waves for a, b in itertools.pairwise(found)) and min(x.busy for x in found) > 0.89
