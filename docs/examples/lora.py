"""LoRA on a causal language model of Hugging Face: only the adapters are trained, and saved."""

import os
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hpctrain.tasks.text import Text


class Lora(Text):
    """Adapt a causal language model to the text of hpctrain's own task (Hu et al., 2021).

    Args:
        base: folder of the model, as `save_pretrained` writes it. A missing `tiny_llama` is made, with random weights
            and bytes as its tokens, so that the example needs no download.
        rank: of the adapters.
        alpha: their output is multiplied by alpha / rank.
        dropout: of the adapters' inputs.
        targets: names of the layers that get adapters.
        context_length: bytes per sample.
    """

    def __init__(
        self,
        base: str = "models/tiny_llama",
        rank: int = 8,
        alpha: int = 16,
        dropout: float = 0.05,
        targets: tuple[str, ...] = ("q_proj", "v_proj"),
        context_length: int = 128,
    ) -> None:
        super().__init__(context_length)
        self.base = Path(base).absolute()
        self.adapters = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets))

    def prepare(self) -> None:
        if self.base.name == "tiny_llama" and not self.base.exists():
            shape: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
            tiny = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=self.context_length, **shape))
            # under another name first: if this is interrupted, no half of a model remains
            unfinished = self.base.with_name(f"{self.base.name}.{os.getpid()}")
            tiny.save_pretrained(unfinished)
            unfinished.rename(self.base)

    def build_model(self) -> nn.Module:
        base = AutoModelForCausalLM.from_pretrained(self.base, local_files_only=True)
        # in training mode: from_pretrained returns modules in evaluation mode, and peft doesn't change that
        return without_frozen_weights(get_peft_model(base, self.adapters).train())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        given, targets = batch
        logits = model(input_ids=given, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def without_frozen_weights(model: nn.Module) -> nn.Module:
    """Leave frozen weights out of checkpoints: `build_model` reads them from the folder of the base model."""
    frozen = {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}

    def leave_out(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name in frozen:
            del state[prefix + name]

    def expect_none(_: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]

    model.register_state_dict_post_hook(leave_out)
    model.register_load_state_dict_post_hook(expect_none)
    return model
