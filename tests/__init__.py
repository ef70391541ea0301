"""A package, so that test files say `from tests import oracles, statistics` and never shadow the standard library."""
