"""LM head + sampling on one GPU, bfloat16, in torch: the peers, timed as `benchmarks.bench_gpu` times jax.

Run in a process without jax. A timed loop is one CUDA graph of many calls, replayed; a contender that synchronises with the
host cannot be captured, and is given the sum of its kernels' times as the profiler sees them, which leaves out its gaps (`how`
says which). The loops of a cell take turns. Before a head is timed, every sampler's law is compared with the softmax of its
own logits by a chi-square.

Logits are bfloat16, as in serving stacks, unless the name says float32: a sampler then draws from rounded logits, and reads and
writes half the bytes.
"""

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import records, timing
from benchmarks.shapes import GPU_HEADS, GPU_ROWS, HEADS, Head

MATMUL, MATMUL_F32, ARGMAX = "matmul", "matmul, float32", "argmax"
MULTINOMIAL, RACE = "compiled multinomial", "compiled exponential race"
FLASHINFER, FLASHINFER_F32, FILTERED = "FlashInfer", "FlashInfer, float32", "FlashInfer top_k=50 top_p=0.9"
CAPTURED = "CUDA graph"
SEED = 20


def logits_bf16(h, w):
    return F.linear(h, w)


def logits_f32(h, w):
    return torch.mm(h, w.t(), out_dtype=torch.float32) if h.is_cuda else h.float() @ w.float().t()


@functools.partial(torch.compile, dynamic=False)
def multinomial(h, w):
    return torch.multinomial(torch.softmax(logits_bf16(h, w).float(), dim=-1), 1)[:, 0]


@functools.partial(torch.compile, dynamic=False)
def exponential_race(h, w):
    probs = torch.softmax(logits_bf16(h, w).float(), dim=-1)
    return torch.argmax(probs / torch.empty_like(probs).exponential_(), dim=-1)


def flashinfer_gumbel(logits, i):
    from flashinfer.sampling import sampling_from_logits

    return sampling_from_logits(logits, seed=SEED, offset=4 * i)  # a call uses four numbers of each of its streams


def flashinfer_filtered(logits, i):
    from flashinfer.sampling import top_k_top_p_sampling_from_logits

    return top_k_top_p_sampling_from_logits(logits.float(), 50, 0.9, seed=SEED, offset=128 * i)


class Contender(NamedTuple):
    """`call(h, w, i)` is the i-th of a loop; a sampler has the logits whose softmax it claims to draw from."""

    call: Callable
    sampled_logits: Callable | None = None


CONTENDERS = {
    MATMUL: Contender(lambda h, w, i: logits_bf16(h, w)),
    MATMUL_F32: Contender(lambda h, w, i: logits_f32(h, w)),
    ARGMAX: Contender(lambda h, w, i: torch.argmax(logits_bf16(h, w), dim=-1)),
    MULTINOMIAL: Contender(lambda h, w, i: multinomial(h, w), logits_bf16),
    RACE: Contender(lambda h, w, i: exponential_race(h, w), logits_bf16),
    FLASHINFER: Contender(lambda h, w, i: flashinfer_gumbel(logits_bf16(h, w), i), logits_bf16),
    FLASHINFER_F32: Contender(lambda h, w, i: flashinfer_gumbel(logits_f32(h, w), i), logits_f32),
    FILTERED: Contender(lambda h, w, i: flashinfer_filtered(logits_bf16(h, w), i)),
}


def inputs(head: Head, rows: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """h and w as in `bench_gpu`: logits that spread about as a language model's do."""
    torch.manual_seed(1)
    w = torch.randn(head.vocab, head.d_model, dtype=torch.bfloat16, device=device) * (2 / head.d_model**0.5)
    return torch.randn(rows, head.d_model, dtype=torch.bfloat16, device=device), w


def check_law(name: str, h, w, *, rows: int = 256, calls: int = 64, num_bins: int = 32) -> float:
    """p-value of a chi-square of a sampler against the float64 softmax of its logits, over bins of about equal mass; raises
    under 1e-6."""
    contender, h = CONTENDERS[name], h[:1].expand(rows, -1).contiguous()
    probs = torch.softmax(contender.sampled_logits(h, w)[0].double(), dim=0)
    order = torch.argsort(probs)
    bin_of = torch.empty_like(order)
    bin_of[order] = (torch.cumsum(probs[order], 0) * num_bins).long().clamp(max=num_bins - 1)
    tokens = torch.cat([contender.call(h, w, i).long().flatten() for i in range(calls)])
    if not ((tokens >= 0) & (tokens < len(probs))).all():
        raise SystemExit(f"{name} drew a token outside the vocabulary: nothing was timed")
    expected = torch.zeros(num_bins, dtype=torch.float64, device=h.device).index_add_(0, bin_of, probs) * len(tokens)
    counts = torch.bincount(bin_of[tokens], minlength=num_bins).double()
    used = expected > 0
    statistic = ((counts - expected)[used].square() / expected[used]).sum()
    p = float(torch.special.gammaincc((used.sum().double() - 1) / 2, statistic / 2))
    if not p > 1e-6:
        raise SystemExit(f"{name} does not draw from the softmax of its logits (chi-square, p = {p:.1e}): nothing was timed")
    return p


def unable(names: list[str], h, w) -> dict[str, str]:
    """The contenders that do not run here, and why."""
    why = {}
    for name in names:
        try:
            CONTENDERS[name].call(h, w, 0)
        except Exception as error:  # a package that is missing or does not build must not cost the other contenders
            why[name] = f"{type(error).__name__}: {error}"[-500:]
    return why


def synchronizes(call: Callable) -> bool:
    """Whether a call waits for the device, so that no CUDA graph can hold it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(0)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def timed_loop(call: Callable[[int], Any], calls: int) -> tuple[Callable[[], float], str]:
    """A function that runs `calls` calls and returns device seconds per call, and how it measures them."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for i in range(3):
            call(i)
    torch.cuda.current_stream().wait_stream(warm_up)
    torch.cuda.synchronize()
    if not synchronizes(call):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i)
        loop = functools.partial(replay_seconds, graph, calls)
        loop()
        return loop, CAPTURED
    loop = functools.partial(kernel_seconds, call, calls)
    if loop() > 0:
        return loop, "profiler: the sum of its kernels, without its gaps"
    return functools.partial(event_seconds, call, calls), "CUDA events around the calls, with its gaps"


def replay_seconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Seconds per call of one replay, by the clock that times jax."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def kernel_seconds(call: Callable[[int], Any], calls: int) -> float:
    """Device seconds per call in kernels and copies; 0 where the profiler sees none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    return 1e-6 * sum(event.self_device_time_total for event in profile.key_averages()) / calls


def event_seconds(call: Callable[[int], Any], calls: int) -> float:
    """Seconds per call between two events in the stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(calls):
        call(i)
    end.record()
    torch.cuda.synchronize()
    return 1e-3 * start.elapsed_time(end) / calls


def measure(head: Head, h, w, names: list[str], *, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    torch._dynamo.reset()  # every shape compiled for itself
    calls = timing.calls_per_loop(w.nbytes, 2 * len(h) * w.numel())
    loops, how = {}, {}
    for name in names:
        loops[name], how[name] = timed_loop(lambda i, call=CONTENDERS[name].call: call(h, w, i), calls)
    samples = timing.take_turns(loops, rounds=rounds)
    return {
        "head": head._asdict(), "rows": len(h), "iterations": calls, "how": how,
        "seconds": {name: timing.summarize(s)._asdict() for name, s in samples.items()},
        "ratio": {name: timing.ratio(s, samples[MATMUL])._asdict() for name, s in samples.items()},
    }


def environment() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if importlib.util.find_spec("flashinfer"):
        import flashinfer

        versions["flashinfer"] = flashinfer.__version__
    return records.environment(device=torch.cuda.get_device_name(), platform_name="gpu",
                               num_devices=torch.cuda.device_count(), versions=versions)


def table(results: list[dict[str, Any]]) -> Table:
    """Microseconds; a star: not from a CUDA graph."""
    shown = Table(title="LM head + sampling in torch, bfloat16: median us per call (*: not from a CUDA graph)",
                  box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("head", "rows", *results[0]["seconds"]):
        shown.add_column(column, justify="left" if column == "head" else "right")
    for row in results:
        star = {name: "" if how == CAPTURED else "*" for name, how in row["how"].items()}
        shown.add_row(row["head"]["name"], str(row["rows"]),
                      *(f"{1e6 * t['median']:.1f}{star[name]}" for name, t in row["seconds"].items()))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_torch", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", choices=[head.name for head in HEADS], default=[head.name for head in GPU_HEADS])
    parser.add_argument("--rows", type=int, nargs="+", default=list(GPU_ROWS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[c for c in CONTENDERS if c != FILTERED],
                        help="matmul always takes part (default: all but the filtered one)")
    parser.add_argument("--rounds", type=int, default=30, help="loops timed for each median (default 30)")
    parser.add_argument("--name", default="torch", help="results/<name>.json is written (default torch)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark is about GPUs, and torch sees none")
    names = [name for name in CONTENDERS if name in {*arguments.contenders, MATMUL}]
    results, laws, absent = [], {}, {}
    for head in (head for head in HEADS if head.name in arguments.heads):
        all_h, w = inputs(head, max(arguments.rows))
        if not results:
            absent = unable(names, all_h, w)
            names = [name for name in names if name not in absent]
        laws[head.name] = {name: check_law(name, all_h, w) for name in names if CONTENDERS[name].sampled_logits}
        for rows in track(arguments.rows, description=head.name):
            results.append(measure(head, all_h[:rows].contiguous(), w, names, rounds=arguments.rounds))
            # After every cell: a long run may be cut short.
            records.save(arguments.name, results, environment(), claim=__doc__.splitlines()[0], base=MATMUL, law_p=laws,
                         absent=absent)
        del all_h, w
    Console(width=170).print(table(results))
    for name, why in absent.items():
        print(f"{name} did not run: {why}")


if __name__ == "__main__":
    main()
