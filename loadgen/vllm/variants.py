"""Small checkpoints of other architectures with random weights, and a LoRA adapter, made on the spot. No tokenizers.

GLM-4-MoE: sigmoid scores with a correction bias, grouped top-k, a shared expert, dense first layers. GPT-OSS: sliding
windows in every other layer, so two KV-cache groups. OLMoE: softmax without normalisation. Weights are bfloat16.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCAB = 1024
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _glm4_moe() -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **_COMMON,
        num_hidden_layers=5,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=2,
        num_mtp_layers=0,
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **_COMMON,
        num_hidden_layers=4,
        head_dim=64,
        intermediate_size=128,
        num_local_experts=16,
        num_experts_per_tok=4,
        sliding_window=64,
    )


def _olmoe() -> Any:
    from transformers import OlmoeConfig

    return OlmoeConfig(**_COMMON, num_hidden_layers=3, intermediate_size=64, num_experts=16, num_experts_per_tok=4)


ARCHITECTURES: dict[str, Callable[[], Any]] = {"glm4_moe": _glm4_moe, "gpt_oss": _gpt_oss, "olmoe": _olmoe}


def make_variant(name: str, out: Path) -> Path:
    """Writes the checkpoint of one of ARCHITECTURES to ``out`` unless it is there."""
    import torch
    from transformers import AutoModelForCausalLM

    if (out / "config.json").exists():
        return out
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name]())
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "e_score_correction_bias" in key:
                tensor.copy_(0.1 * torch.randn(tensor.shape))
            elif tensor.dim() >= 2:
                tensor.copy_(0.08 * torch.randn(tensor.shape))
            elif "bias" in key or "sinks" in key:
                tensor.copy_(0.02 * torch.randn(tensor.shape))
    model.to(torch.bfloat16).save_pretrained(out)
    return out


def make_adapter(checkpoint: Path, out: Path, rank: int = 8) -> Path:
    """Writes a LoRA adapter of q_proj and v_proj in every layer, strong enough to change the routing of later layers."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((checkpoint / "config.json").read_text())
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    widths = {"q_proj": heads * dim, "v_proj": config["num_key_value_heads"] * dim}
    g = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = (0.3 * torch.randn(rank, hidden, generator=g)).bfloat16()
            tensors[f"{key}.lora_B.weight"] = (0.3 * torch.randn(width, rank, generator=g)).bfloat16()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(widths), "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))
    return out


def merge_adapter(model: Any, adapter: Path) -> None:
    """Adds the adapter's products to a transformers model's weights."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for key, a in tensors.items():
            if key.endswith("lora_A.weight"):
                b = tensors[key.replace("lora_A", "lora_B")]
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                model.get_submodule(name).weight.add_(b.float() @ a.float())
