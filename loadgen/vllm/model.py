"""A small Qwen3-MoE checkpoint whose experts specialise by domain, made on the spot without training or downloads.

Token t belongs to domain t % domains. Embeddings share one direction per domain, each row of a router leans to one
domain, attention and expert outputs are small beside the residual, and the LM head keeps greedy output in the prompt's
domain. A prompt of one domain then uses about 1/domains of the experts that a mixed batch uses. Weights are stored in
bfloat16, so a float32 server and float32 transformers hold the very same numbers.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_STAMP = "eldrd-model.json"
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The checkpoint's shape; heads is the number of attention heads of 64 dimensions, half as many hold keys."""

    layers: int = 4
    hidden: int = 256
    experts: int = 32
    topk: int = 4
    intermediate: int = 128
    heads: int = 8
    vocab: int = 4096
    max_positions: int = 8192
    domains: int = 4
    seed: int = 0

    def domain_tokens(self, domain: int) -> range:
        """All token ids of a domain that are no special tokens."""
        return range(domain + self.domains * -(-len(_SPECIAL) // self.domains), self.vocab, self.domains)


def make_model(out: Path, spec: ModelSpec | None = None) -> Path:
    """Writes the checkpoint and its tokenizer to ``out`` unless they are there. Needs torch and transformers."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    spec = spec or ModelSpec()
    stamp = out / _STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == asdict(spec):
        return out
    out.mkdir(parents=True, exist_ok=True)
    end, pad = _make_tokenizer(out, spec)
    config = Qwen3MoeConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=max(1, spec.heads // 2),
        head_dim=64,
        intermediate_size=2 * spec.hidden,
        moe_intermediate_size=spec.intermediate,
        num_experts=spec.experts,
        num_experts_per_tok=spec.topk,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=spec.max_positions,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(spec.seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        _set_weights(model, spec)
    model.to(torch.bfloat16).save_pretrained(out)
    GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=False).save_pretrained(out)
    stamp.write_text(json.dumps(asdict(spec)))
    return out


def _make_tokenizer(out: Path, spec: ModelSpec) -> tuple[int, int]:
    """A byte-level BPE tokenizer trained on invented words; the ids of the end-of-turn and padding tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(spec.seed)
    syllables = [c + v for c in "bcdfghjklmnprstvwz" for v in ("a", "e", "i", "o", "u", "ai", "ou", "en", "ar")]
    words = ["".join(rng.choice(syllables) for _ in range(rng.randint(1, 4))) for _ in range(12_000)]
    corpus = [" ".join(rng.choice(words) for _ in range(200)) for _ in range(400)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    missing = spec.vocab - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(missing)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<|pad|>",  # noqa: S106
        unk_token="<|endoftext|>",  # noqa: S106
        model_max_length=spec.max_positions,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(out)
    return fast.convert_tokens_to_ids("<|im_end|>"), fast.convert_tokens_to_ids("<|pad|>")


def _set_weights(model: Any, spec: ModelSpec) -> None:
    import torch

    g = torch.Generator().manual_seed(spec.seed + 1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.copy_(0.08 * torch.randn(parameter.shape, generator=g))
    direction = torch.linalg.qr(noise(spec.hidden, spec.domains))[0].T
    domain = torch.arange(spec.vocab) % spec.domains
    model.model.embed_tokens.weight.copy_(
        0.15 * spec.hidden**0.5 * direction[domain] + 0.05 * noise(spec.vocab, spec.hidden)
    )
    model.lm_head.weight.copy_(6.0 / spec.hidden**0.5 * direction[domain] + 0.02 * noise(spec.vocab, spec.hidden))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.02)
        for name, parameter in layer.mlp.named_parameters():
            if "down_proj" in name:
                parameter.mul_(0.02)
        favourite = torch.randperm(spec.experts, generator=g) % spec.domains
        layer.mlp.gate.weight.copy_(0.2 * direction[favourite] + 0.05 * noise(spec.experts, spec.hidden))


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--layers", default=4, show_default=True, help="Decoder layers, all of them MoE.")
@click.option("--hidden", default=256, show_default=True, help="Width of the residual stream.")
@click.option("--experts", default=32, show_default=True, help="Routed experts a layer.")
@click.option("--topk", default=4, show_default=True, help="Experts a token.")
@click.option("--intermediate", default=128, show_default=True, help="Width of one expert.")
@click.option("--domains", default=4, show_default=True, help="Domains; token t belongs to domain t mod this.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights and the tokenizer.")
def main(out: Path, **shape: int) -> None:
    """Make a domain-structured Qwen3-MoE checkpoint in OUT."""
    make_model(out, ModelSpec(**shape))


if __name__ == "__main__":
    main()
