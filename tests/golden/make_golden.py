"""Makes the golden arrays of this folder with Hugging Face transformers on CPU. Run once, in an environment of its own.

    pip install torch transformers gguf sentencepiece numpy safetensors
    python make_golden.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

smollm2.npz: prompt ids, 200 greedy tokens and float32 logits of SmolLM2, and its tokenizer's ids of awkward strings.
tiny_*.npz: weights, configuration and logits of two-layer random models of each family, long-context rope included.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
PROMPTS = ("What is the capital of France?", "Write a Python function that adds two numbers.", "Tell me about the sea.")
TEXTS = (
    "Hello, world!",
    " leading and  double   spaces\tand\ttabs\n\nand lines\r\n",
    "In 1984 there were 12345678.90 of 3x^2 + 7",
    "def f(x):\n    return {'a': x**2, \"b\": [1, 2]}  # comment\n",
    "emoji \U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 end",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "na\u00efve caf\u00e9 \u00fcber \u0441\u043b\u043e\u0432\u043e \u0645\u0631\u062d\u0628\u0627",
    "<|im_start|>user\nhi<|im_end|>\n",
    "don't can't I'll we've THEY'RE",
    "",
)
TINY = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,
)


def smollm2(path: Path) -> dict:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    golden = {"texts": json.dumps(TEXTS), "prompts": json.dumps(PROMPTS)}
    for i, text in enumerate(TEXTS):
        golden[f"text_{i}"] = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    for i, prompt in enumerate(PROMPTS):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
            # Greedy without an end token: the continuation after it is checked too.
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, min_new_tokens=200,
                do_sample=False, eos_token_id=None, pad_token_id=2,
            )  # fmt: skip
        golden[f"prompt_{i}"] = ids[0].numpy().astype(np.int32)
        golden[f"logits_{i}"] = logits.numpy()
        golden[f"tokens_{i}"] = out[0, ids.shape[1] :].numpy().astype(np.int32)
        print(tokenizer.decode(golden[f"tokens_{i}"][:40]))
    return golden


def tiny(model_class, config) -> dict:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm scales and biases start at 1 and 0, where a missing or swapped one would not show.
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        tokens = torch.randint(0, config.vocab_size, (2, 40))
        logits = model(tokens).logits
    fields = {k: v for k, v in model.config.to_dict().items() if k not in ("transformers_version", "dtype")}
    fields["architectures"] = [model_class.__name__]
    weights = {f"weight:{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("weight:lm_head.weight", None)
    return {
        "config": json.dumps(fields),
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.numpy(),
        **weights,
    }


def main() -> None:
    llama3 = {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    plain = {"rope_type": "default", "rope_theta": 1000.0}
    models = {
        "tiny_llama": (LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=True, rope_parameters=plain)),
        "tiny_llama3": (LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=False, rope_parameters=llama3)),
        "tiny_mistral": (MistralForCausalLM, MistralConfig(**TINY, sliding_window=9, rope_parameters=plain)),
        "tiny_qwen2_window": (
            Qwen2ForCausalLM,
            Qwen2Config(**TINY, use_sliding_window=True, sliding_window=7, max_window_layers=1, rope_parameters=plain),
        ),
        "tiny_qwen2": (Qwen2ForCausalLM, Qwen2Config(**TINY, tie_word_embeddings=False, rope_parameters=plain)),
        "tiny_qwen3": (
            Qwen3ForCausalLM,
            Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True, rope_parameters=plain),
        ),
    }
    for name, (model_class, config) in models.items():
        np.savez_compressed(HERE / f"{name}.npz", **tiny(model_class, config))
    np.savez_compressed(HERE / "smollm2.npz", **smollm2(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
