"""Draw tokens from language models in JAX, exactly and fast."""

__version__ = "0.1.0"
