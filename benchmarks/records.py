"""Results on disk: benchmarks/results/<name>.json, with the machine, the versions and the commit (it imports no jax)."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment(*, device: str | None, platform_name: str, num_devices: int, versions: Mapping[str, str]) -> dict[str, Any]:
    """Where and with what a result was made; `device` None: this machine's CPU."""
    return {
        "device": device or _cpu_name(),
        "platform": platform_name,
        "num_devices": num_devices,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": dict(versions),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """Short commit of the working tree, with "+" when it differs; None outside git."""
    try:
        said = [
            subprocess.run(["git", *command], cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "*.py"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[0].strip() + ("+" if said[1].strip() else "")


def save(name: str, rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any], **about: Any) -> Path:
    """Writes results/<name>.json: what was measured, where, and one mapping for each row of the table."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"name": name, **about, "environment": environment, "rows": list(rows)}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def load(name: str) -> dict[str, Any]:
    """Reads results/<name>.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())
