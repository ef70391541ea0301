"""Two processes of four devices: the tokens of one process with one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

import gumbeljax
from tests.sharding import one_of_two

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_two_processes_draw_what_one_device_draws():
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-m", "tests.sharding.one_of_two", port]
    both = [subprocess.Popen([*command, str(i)], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE) for i in range(2)]
    try:
        said = [process.communicate(timeout=300) for process in both]
    finally:
        for process in both:
            process.kill()
    assert all(process.returncode == 0 for process in both), "".join(error for _, error in said)[-4000:]
    reports = [json.loads(out.splitlines()[-1]) for out, _ in said]

    h, w, tokens = one_of_two.problem()
    want = gumbeljax.sample_with_log_probs(h, w, jax.random.key(3))
    scores = gumbeljax.log_prob(h, w, tokens)
    for kind in ("Auto", "Explicit"):
        for name, (data, _) in one_of_two.MESHES.items():
            rows = set()
            for report in reports:
                token, log_prob, score = report[kind][name]
                assert token and token.keys() == log_prob.keys() == score.keys()
                rows |= token.keys()
                for i in map(int, token):
                    assert token[str(i)] == want.token[i], (kind, name, i)
                    np.testing.assert_allclose(log_prob[str(i)], want.tempered_log_prob[i], rtol=1e-5)
                    np.testing.assert_allclose(score[str(i)], scores[i], rtol=1e-5)
            assert rows == {str(i) for i in range(one_of_two.ROWS)}
            if data > 1:  # rows were cut between the processes: neither saw all
                assert all(len(report[kind][name][0]) < one_of_two.ROWS for report in reports)
