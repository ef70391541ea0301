"""Measured choices of implementation and tiles, by shape and device. They change speed, never a token."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.tiles import MosaicTiles, TritonTiles, XlaTiles

TILES = {"xla": XlaTiles, "triton": TritonTiles, "mosaic": MosaicTiles}
Tiles = XlaTiles | TritonTiles | MosaicTiles
BUILT_IN = Path(__file__).parent / "tuned"


class Place(NamedTuple):
    """What a choice is for: the name of a device, the rows of `h`, and the table `w` with the dtypes of both."""

    device: str
    rows: int
    d_model: int
    vocab: int
    dtype: str
    vocab_axis: int


@dataclasses.dataclass(frozen=True)
class TunedShape:
    """What was fastest at a place. Seconds are device time per draw: of the choice, and of what ran without it."""

    place: Place
    implementation: str
    tiles: Tiles
    seconds: float
    untuned_seconds: float


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A table of measured choices, to be passed as `implementation`. Hashable: it is part of what a call is compiled for.

    Made by `gumbeljax.autotune`, read by `gumbeljax.load_tuning`. `command` says how the table was made.
    """

    shapes: tuple[TunedShape, ...] = ()
    command: str = ""

    def find(self, place: Place) -> TunedShape | None:
        """The choice for a call: that of its head and device with the fewest rows that hold the call's, or None."""
        held = [x for x in self.shapes if x.place.rows >= place.rows and x.place._replace(rows=place.rows) == place]
        return min(held, key=lambda x: x.place.rows, default=None)

    def without(self, place: Place) -> "Tuning":
        """Without the choice for this place."""
        return dataclasses.replace(self, shapes=tuple(x for x in self.shapes if x.place != place))

    def updated(self, *shapes: TunedShape) -> "Tuning":
        """With these choices, in place of those for the same places."""
        merged = {x.place: x for x in (*self.shapes, *shapes)}
        return dataclasses.replace(self, shapes=tuple(merged[place] for place in sorted(merged)))


def save_tuning(tuning: Tuning, path: str | Path) -> None:
    """Writes a table as JSON, with the version of jax that measured it.

    >>> import tempfile, gumbeljax
    >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
    ...     gumbeljax.save_tuning(gumbeljax.Tuning(command="by hand"), file.name)
    ...     gumbeljax.load_tuning(file.name)
    Tuning(shapes=(), command='by hand')
    """
    shapes = [{**x.place._asdict(), "implementation": x.implementation, "tiles": dataclasses.asdict(x.tiles),
               "seconds": x.seconds, "untuned_seconds": x.untuned_seconds} for x in tuning.shapes]
    record = {"command": tuning.command, "jax": jax.__version__, "shapes": shapes}
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def load_tuning(path: str | Path) -> Tuning:
    """A table of measured choices from a file that `gumbeljax.autotune` wrote: pass it as `implementation`.

    A call whose device, d_model, vocabulary, dtypes and layout are in the table runs the choice measured for the fewest rows
    that hold its own; any other call, and one that the choice cannot run, runs as with `implementation=None`. Tokens are the
    same in any case.

    Raises:
      ValueError: the file is not such a table.
      OSError: it is not there, or cannot be read.

    >>> import tempfile, jax.numpy as jnp, gumbeljax
    >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
    ...     gumbeljax.save_tuning(gumbeljax.Tuning(), file.name)
    ...     tuning = gumbeljax.load_tuning(file.name)
    >>> gumbeljax.choose_implementation(jnp.ones(16), jnp.ones((32, 16)), tuning)
    'xla'
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        for x in record["shapes"]:
            for field, kind in Place.__annotations__.items():
                if not isinstance(x[field], kind):
                    raise TypeError(f"{field} must be of type {kind.__name__}, got {x[field]!r}")
        shapes = [TunedShape(Place(*(x[field] for field in Place._fields)), x["implementation"],
                             TILES[x["implementation"]](**x["tiles"]), x["seconds"], x["untuned_seconds"])
                  for x in record["shapes"]]
        return Tuning(command=record["command"]).updated(*shapes)
    except OSError as error:
        raise type(error)(f"path must be a file that gumbeljax.autotune wrote; got {str(path)!r}, where reading says "
                          f"{error.strerror}: check the path.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"path must be a file that gumbeljax.autotune of this version wrote; got {str(path)!r}, where "
                         f"{type(error).__name__} says {error}: run it again.") from error


@functools.cache
def built_in() -> Tuning:
    """The tables under `tuned`, a part of the package; there may be none."""
    tables = [load_tuning(path) for path in sorted(BUILT_IN.glob("*.json"))]
    return Tuning().updated(*(x for table in tables for x in table.shapes))


def place_of(device: str, h, w, vocab_axis: int) -> Place:
    """Of a checked call."""
    dtype = str(h.dtype) if h.dtype == w.dtype else f"{h.dtype} x {w.dtype}"
    return Place(device, h.shape[0], h.shape[1], w.shape[vocab_axis], dtype, vocab_axis)
