"""Verification from hidden states in compiled torch on one GPU, timed as `benchmarks.bench_verify` times jax.

Two log-softmax tensors, gather, first rejection, residual, and a draw by an exponential race; the same drafts again and again,
with new coins. Logits are bfloat16, as in serving stacks: half the bytes of float32 ones. Run in a process without jax; a
timed loop is one CUDA graph of many calls.
"""

import argparse
import functools
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import records, timing
from benchmarks.bench_torch import environment, timed_loop
from benchmarks.shapes import QWEN3_1_7B, QWEN3_8B, Head

VERIFY = "compiled verification"


class Inputs(NamedTuple):
    """As in `bench_verify`, with one set of drafts."""

    h: torch.Tensor
    draft_h: torch.Tensor
    w: torch.Tensor
    draft_w: torch.Tensor
    drafted: torch.Tensor


@functools.partial(torch.compile, dynamic=False)
def verify(h, draft_h, w, draft_w, drafted):
    """(tokens `[rows, draft_len + 1]`, num_accepted `[rows]`)."""
    log_p, log_q = (torch.log_softmax(F.linear(*x).float(), dim=-1) for x in ((h, w), (draft_h, draft_w)))
    draft_len = drafted.shape[1]
    ratio = (log_p[:, :-1].gather(-1, drafted[..., None]) - log_q.gather(-1, drafted[..., None]))[..., 0]
    n = (torch.rand_like(ratio).log() < ratio).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(n), device=n.device)
    p, q = log_p[rows, n].exp(), log_q[rows, n.clamp(max=draft_len - 1)].exp()
    law = torch.where((n < draft_len)[:, None], (p - q).clamp(min=0), p)
    last = torch.argmax(law / torch.empty_like(law).exponential_(), dim=-1)
    place = torch.arange(draft_len + 1, device=n.device)
    return torch.where(place == n[:, None], last[:, None], F.pad(drafted, (0, 1))), n


def inputs(w, draft_w, *, rows: int, draft_len: int, accepted: float) -> Inputs:
    """Laws of overlap about `accepted`, as `bench_verify.inputs` makes them."""
    d_model, width = w.shape[1], draft_w.shape[1]
    noise = -2 * NormalDist().inv_cdf(accepted / 2) / (2 * (1 - width / d_model) ** 0.5)
    torch.manual_seed(4)
    shared = (d_model / width) ** 0.5 * torch.randn(rows, draft_len + 1, width, device=w.device)
    rest = noise * torch.randn(rows, draft_len + 1, d_model - width, device=w.device)
    h, draft_h = torch.cat([shared, rest], dim=-1).to(w.dtype), shared[:, :-1].to(w.dtype).contiguous()
    q = torch.softmax(F.linear(draft_h, draft_w).float(), dim=-1)
    drafted = torch.multinomial(q.flatten(0, 1), 1).view(rows, draft_len)
    return Inputs(h, draft_h, w, draft_w, drafted)


def check(x: Inputs, *, calls: int = 64) -> dict[str, float]:
    """Raises unless tokens are in the vocabulary and these drafts are accepted as often as min(1, p / q) says."""
    p, q = (torch.softmax(F.linear(*pair).float(), dim=-1) for pair in ((x.h[:, :-1], x.w), (x.draft_h, x.draft_w)))
    ratio = (p.gather(-1, x.drafted[..., None]) / q.gather(-1, x.drafted[..., None]))[:, 0, 0].clamp(max=1)
    outs = [verify(*x) for _ in range(calls)]
    tokens, n = (torch.stack(part) for part in zip(*outs, strict=True))
    seen, wanted = float((n > 0).float().mean()), float(ratio.mean())
    error = (float((ratio * (1 - ratio)).sum()) / calls) ** 0.5 / len(ratio)
    if tokens.min() < 0 or tokens.max() >= len(x.w) or abs(seen - wanted) > 5 * error + 0.01:
        raise SystemExit(f"first token accepted {seen:.3f} of the time, not {wanted:.3f}: nothing was timed")
    return {"acceptance": float(torch.minimum(p, q).sum(-1).mean()), "first_accepted": seen, "first_expected": wanted}


def measure(x: Inputs, *, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    size = x.w.numel() + x.draft_w.numel()
    calls = timing.calls_per_loop(2 * size, 2 * x.h.shape[0] * x.h.shape[1] * size)
    verify(*x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    verify(*x)
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() - before
    loop, how = timed_loop(lambda i: verify(*x), calls)
    return {"iterations": calls, "how": how, "temp_bytes": memory,
            "seconds": {VERIFY: timing.summarize([loop() for _ in range(rounds)])._asdict()}}


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title="Verification from hidden states in torch, bfloat16: median us per call", box=box.SIMPLE_HEAD)
    for column in ("rows", "drafted", "overlap", VERIFY, "MiB"):
        shown.add_column(column, justify="right")
    for row in results:
        shown.add_row(str(row["rows"]), str(row["draft_len"]), f"{row['acceptance']:.2f}",
                      f"{1e6 * row['seconds'][VERIFY]['median']:.1f}", f"{row['temp_bytes'] / 2**20:.1f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_torch_verify", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0.5, 0.8], help="wanted overlaps of the two laws")
    parser.add_argument("--rounds", type=int, default=20, help="loops timed for each median (default 20)")
    parser.add_argument("--name", default="verify-torch", help="results/<name>.json is written (default verify-torch)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark is about GPUs, and torch sees none")
    torch.manual_seed(1)
    w = torch.randn(QWEN3_8B.vocab, QWEN3_8B.d_model, dtype=torch.bfloat16, device="cuda") * (2 / QWEN3_8B.d_model**0.5)
    draft_w, results = w[:, :QWEN3_1_7B.d_model].contiguous(), []
    for rows in arguments.rows:
        for draft_len in arguments.draft_lens:
            torch._dynamo.reset()  # every shape compiled for itself
            for accepted in arguments.acceptances:
                x = inputs(w, draft_w, rows=rows, draft_len=draft_len, accepted=accepted)
                results.append({
                    "head": Head("target", *w.shape)._asdict(), "draft_head": Head("draft", *draft_w.shape)._asdict(),
                    "rows": rows, "draft_len": draft_len, "wanted": accepted,
                    **check(x), **measure(x, rounds=arguments.rounds)})
                # After every cell: a long run may be cut short.
                records.save(arguments.name, results, environment(), claim=__doc__.splitlines()[0], base=VERIFY)
    Console(width=120).print(table(results))


if __name__ == "__main__":
    main()
