"""One device for benchmarks that were started together."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from typing import Any


class _Hold:
    """How many threads of this process hold the device, and the open file whose lock says so to other processes."""

    mutex = threading.Lock()
    threads = 0
    file: Any = None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Holds the device against other benchmarks, where GUMBELJAX_BENCHMARK_LOCK names a file that they all lock.

    Tracing a kernel takes seconds of one core: benchmarks started together do that side by side and measure one after the
    other. Threads of one process hold it together.
    """
    path = os.environ.get("GUMBELJAX_BENCHMARK_LOCK")
    if path is None:
        yield
        return
    with _Hold.mutex:
        if _Hold.threads == 0:
            _Hold.file = open(path, "a")  # noqa: SIM115
            fcntl.flock(_Hold.file, fcntl.LOCK_EX)
        _Hold.threads += 1
    try:
        yield
    finally:
        with _Hold.mutex:
            _Hold.threads -= 1
            if _Hold.threads == 0:
                _Hold.file.close()
