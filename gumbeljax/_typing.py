"""Types that appear in public signatures."""

from typing import Any, Literal

import jax

Array = jax.Array
ArrayLike = Any  # numpy arrays, jax arrays, numbers
Key = Any  # a typed key array (jax.random.key) or raw uint32 key data
Method = Literal["grouped", "categorical"]
Mode = Literal["low", "high", "highest"]
Implementation = Literal["xla", "triton", "mosaic"]
