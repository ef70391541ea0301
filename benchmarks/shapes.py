"""Language-model heads that people run, by name: the shapes that benchmarks time and tests check."""

from typing import NamedTuple


class Head(NamedTuple):
    """An lm_head `w [vocab, d_model]`."""

    name: str
    vocab: int
    d_model: int


SMOLLM2_135M = Head("SmolLM2-135M", 49_152, 576)
GPT2 = Head("GPT-2", 50_257, 768)
QWEN3_0_6B = Head("Qwen3-0.6B", 151_936, 1_024)
QWEN3_1_7B = Head("Qwen3-1.7B", 151_936, 2_048)
QWEN3_8B = Head("Qwen3-8B", 151_936, 4_096)
LLAMA3_70B = Head("Llama-3-70B", 128_256, 8_192)
ODD = Head("odd", 1_009, 64)  # no model's: a prime vocabulary, smaller than a tile of most kernels

HEADS = (SMOLLM2_135M, GPT2, QWEN3_0_6B, QWEN3_1_7B, QWEN3_8B, LLAMA3_70B, ODD)
CPU_HEADS = (SMOLLM2_135M, QWEN3_0_6B)

ROWS = (1, 3, 16, 17, 64, 128, 256)
CPU_ROWS = (1, 8, 64)

GPU_HEADS = (QWEN3_1_7B, QWEN3_8B, LLAMA3_70B)
GPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # and 512, 1,024 on request
