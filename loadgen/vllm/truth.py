"""What a prompt's expert signature really is: the model's own routers, run by transformers in float32. No vLLM here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Routing:
    """One prompt's routing. experts: int64 [tokens, L, k]; logits: float32 [tokens, L, E], what they were chosen by."""

    experts: NDArray[np.int64]
    logits: NDArray[np.float32]

    def part(self, start: int, stop: int) -> Routing:
        """The routing of tokens [start, stop)."""
        return Routing(self.experts[start:stop], self.logits[start:stop])

    @property
    def counts(self) -> NDArray[np.int64]:
        """The signature: tokens by (layer, expert), [L, E]."""
        _, layers, _ = self.experts.shape
        width = self.logits.shape[2]
        return np.stack([np.bincount(self.experts[:, i].ravel(), minlength=width) for i in range(layers)])

    @property
    def gap(self) -> float:
        """The narrowest difference between the last expert chosen and the first one not chosen, in logits."""
        k = self.experts.shape[2]
        ordered = np.sort(self.logits, axis=2)[:, :, ::-1]
        return float((ordered[:, :, k - 1] - ordered[:, :, k]).min())

    def compare(self, counts: NDArray[np.integer], tie: float = 1e-4) -> Comparison:
        """Holds ``counts`` [L, E] against the truth; a difference that near ties of the gate explain is told apart.

        tie: the widest logit gap between two experts that float rounding may swap.
        """
        difference = counts.astype(np.int64) - self.counts
        moved = int(np.abs(difference).sum()) // 2
        balanced = not difference.sum(axis=1).any()
        explained = sum(self._swaps(layer, difference[layer], tie) for layer in range(len(difference)))
        return Comparison(exact=not difference.any(), moved=moved, near_tie=balanced and explained >= moved > 0)

    def _swaps(self, layer: int, difference: NDArray[np.int64], tie: float) -> int:
        """How many of a layer's moved tokens have a swap of two experts closer than ``tie`` to explain them."""
        left = difference.copy()
        logits, chosen = self.logits[:, layer], np.zeros(self.logits[:, layer].shape, np.bool_)
        np.put_along_axis(chosen, self.experts[:, layer], True, axis=1)
        swaps = 0
        for token in range(len(logits)):
            for out in np.flatnonzero(chosen[token] & (left < 0)):
                near = (~chosen[token]) & (left > 0) & (np.abs(logits[token] - logits[token, out]) < tie)
                if near.any():
                    left[out] += 1
                    left[np.flatnonzero(near)[0]] -= 1
                    swaps += 1
        return swaps


@dataclass(frozen=True, slots=True)
class Comparison:
    """exact: equal cell for cell; moved: token choices that differ; near_tie: every one of them is a near tie."""

    exact: bool
    moved: int
    near_tie: bool


class Truth:
    """The checkpoint in transformers, float32, eager attention: slow, plain, and independent of vLLM."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._chosen: dict[int, Any] = {}
        self._logits: dict[int, Any] = {}
        blocks = {i: layer.mlp for i, layer in enumerate(self.model.model.layers) if hasattr(layer.mlp, "experts")}
        self.layers = tuple(blocks)
        for i, block in blocks.items():
            router = block.gate if hasattr(block, "gate") else block.router
            router.register_forward_hook(self._score(i))
            block.experts.register_forward_pre_hook(self._choose(i), with_kwargs=True)

    def _score(self, layer: int) -> Any:
        """What the choice is made by: logits, or for DeepSeek-like routers their sigmoid with the correction bias."""

        def keep(router: Any, inputs: tuple[Any, ...], _output: object) -> None:
            bias = getattr(router, "bias", None)
            hidden = inputs[0].reshape(-1, router.weight.shape[1]).float()
            scores = self._torch.nn.functional.linear(hidden, router.weight.float(), bias)
            correction = getattr(router, "e_score_correction_bias", None)
            self._logits[layer] = scores if correction is None else scores.sigmoid() + correction

        return keep

    def _choose(self, layer: int) -> Any:
        def keep(_experts: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args[1:], *kwargs.values()]
            chosen = next(t for t in given if t is not None and not t.is_floating_point())
            self._chosen[layer] = chosen.reshape(-1, chosen.shape[-1])

        return keep

    def routing(self, tokens: Sequence[int]) -> Routing:
        """Runs one prompt."""
        with self._torch.no_grad():
            self.model(self._torch.tensor([list(tokens)]), use_cache=False)
        logits = np.stack([self._logits[i].float().numpy() for i in self.layers], axis=1)
        experts = np.stack([self._chosen[i].long().numpy() for i in self.layers], axis=1)
        return Routing(experts, logits)
