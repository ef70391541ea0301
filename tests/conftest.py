"""What has to be settled before jax is imported, and which tests need a GPU."""

import gc
import os
from pathlib import Path

# jax <= 0.11.2 sizes its CPU thread pool by NPROC and deadlocks on two cores when several sharded calls are in flight.
os.environ.setdefault("NPROC", "32")
# Eight CPU devices, so that meshes of 2, 4 and 8 shards run anywhere.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# Several pytest processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest


def _why_no_gpu() -> str | None:
    """None when jax sees a GPU, else the reason to print beside each skipped test."""
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return f"no GPU is visible to jax ({str(error).splitlines()[0]})"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where no GPU is visible; ask jax (which starts the device) only when there is one."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := _why_no_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Drop compiled programs before they are too many: each is mapped on its own, and Linux gives a process 65,530 maps."""
    maps = Path("/proc/self/maps")
    if nextitem is not None and maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
