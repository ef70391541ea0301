"""Time per output token of Hugging Face transformers' `generate` on one GPU, bfloat16, random weights, static cache, compiled.

Run in a process without jax, beside `benchmarks.bench_decode`: the same shapes, prompts of 128 tokens, and (t(128 new) -
t(8 new)) / 120 of the host's clock. `generate` compiles its forward pass by itself when the cache is static; the longer run
comes first, since the shorter one then reuses its cache and its compiled code.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from benchmarks import lock, records, timing
from benchmarks.shapes import QWEN3_1_7B, SMOLLM2_135M, Head

PROMPT, FEW, MANY = 128, 8, 128
CELLS = {"qwen3-1.7b": (1, 64, 256), "smollm2-135m": (1, 64)}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "top_k=50 top_p=0.95": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
}


def config_of(shape: str) -> tuple[Head, Any]:
    if shape == "qwen3-1.7b":
        return QWEN3_1_7B, transformers.Qwen3Config(
            vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
    if shape == "smollm2-135m":
        return SMOLLM2_135M, transformers.LlamaConfig(
            vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True)
    return Head("tiny", 1024, 64), transformers.LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True)


def measure(shape: str, rows: int, samplings: list[str], *, device: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of the table, one for each way of sampling; they share what is compiled."""
    head, config = config_of(shape)
    torch.manual_seed(0)
    torch.compiler.reset()
    config.dtype = torch.bfloat16
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    prompts = torch.randint(0, config.vocab_size, (rows, PROMPT), device=device)
    mask = torch.ones_like(prompts)

    def seconds(new_tokens: int, sampling: str) -> float:
        begin = time.perf_counter()
        out = model.generate(prompts, attention_mask=mask, min_new_tokens=new_tokens, max_new_tokens=new_tokens, do_sample=True,
                             cache_implementation="static", pad_token_id=0, eos_token_id=None, **SAMPLINGS[sampling])
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - begin
        assert out.shape == (rows, PROMPT + new_tokens)
        return elapsed

    with lock.alone():  # what compiles keeps the device busy, and is measured nowhere
        for sampling in samplings:
            for new_tokens in (MANY, FEW, MANY, FEW):  # compiles, then captures
                seconds(new_tokens, sampling)
        per_token = {s: lambda s=s: (seconds(MANY, s) - seconds(FEW, s)) / (MANY - FEW) for s in samplings}
        samples = timing.take_turns(per_token, rounds=rounds)
    for sampling in samplings:
        yield {"head": head._asdict(), "rows": rows, "sampling": sampling,
               "seconds": {"generate": timing.summarize(samples[sampling])._asdict()}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_transformers", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=(*CELLS, "tiny"), default=list(CELLS))
    parser.add_argument("--rows", type=int, nargs="+", help="default: 1, 64 and, for the larger model, 256")
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--name", default="transformers", help="results/<name>.json is written (default transformers)")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    results = []
    for shape in arguments.shapes:
        for rows in arguments.rows or CELLS.get(shape, (2,)):
            begin = time.perf_counter()
            for row in measure(shape, rows, arguments.samplings, device=arguments.device, rounds=arguments.rounds):
                results.append(row)
                print(f"{shape}, {rows} rows, {row['sampling']}: {1e3 * row['seconds']['generate']['median']:.3f} ms a token "
                      f"({time.perf_counter() - begin:.0f} s)", flush=True)
            where = records.environment(
                device=torch.cuda.get_device_name() if on_gpu else None, platform_name="gpu" if on_gpu else "cpu",
                num_devices=torch.cuda.device_count() if on_gpu else 1,
                versions={"torch": torch.__version__, "transformers": transformers.__version__})
            records.save(arguments.name, results, where, claim=__doc__.splitlines()[0])


if __name__ == "__main__":
    main()
