"""Log text that a language model continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.callbacks.callback import Callback
from hpctrain.callbacks.training import Training
from hpctrain.errors import TaskError
from hpctrain.parallel.local_part import whole


class LogText(Callback):
    """Has the model continue the first held-out samples, and logs the text.

    For tasks such as `text` and `tokens`: the first tensor of a batch has tokens of shape [n, length], and the model
    returns logits of shape [n, length, vocab_size]. The task's `decode`, if it has one, makes a text of a list of
    tokens; otherwise numbers are logged. The draws depend on the run's seed and the step alone.

    Args:
        num_samples: how many, from the first one on.
        prompt_tokens: tokens of each sample that the model is given.
        new_tokens: tokens to generate.
        temperature: divides the logits; 0 for the most probable token.
    """

    def __init__(
        self, num_samples: int = 2, prompt_tokens: int = 32, new_tokens: int = 64, temperature: float = 0.8
    ) -> None:
        self.num_samples = num_samples
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.temperature = temperature

    def after_evaluation(self, training: Training, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - of the hook
        """Generate on rank zero, or on all ranks that share the model, and log on rank zero."""
        if not training.takes_part or (batch := training.eval_samples(self.num_samples)) is None:
            return
        samples = batch[0] if isinstance(batch, list | tuple) else batch
        if not isinstance(samples, Tensor) or samples.ndim != 2 or samples.is_floating_point():
            raise TaskError("log_text expects batches of the task whose first tensor has tokens [n, length]")
        draws = torch.Generator().manual_seed(training.config.seed + training.position.step)
        context = samples.shape[1]
        tokens = samples[:, : self.prompt_tokens]
        with training.evaluation_mode():
            for _ in range(self.new_tokens):
                logits = whole(training.model(tokens[:, -context:])[:, -1]).float().cpu()
                tokens = torch.cat([tokens, self._draw(logits, draws).to(tokens.device)], 1)
        for number, row in enumerate(tokens.tolist() if training.rank == 0 else ()):
            parts = (
                _decode(training.task, row[: self.prompt_tokens]),
                _decode(training.task, row[self.prompt_tokens :]),
            )
            training.log.text(f"text_{number}", "\n\n---\n\n".join(parts))

    def _draw(self, logits: Tensor, draws: torch.Generator) -> Tensor:
        if not self.temperature:
            return logits.argmax(1, keepdim=True)
        return torch.multinomial((logits / self.temperature).softmax(1), 1, generator=draws)


def _decode(task: Any, tokens: list[int]) -> str:
    decode = getattr(task, "decode", None)
    return " ".join(map(str, tokens)) if decode is None else str(decode(tokens))
