"""A small GPT."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from hpctrain.errors import ConfigError, TaskError
from hpctrain.parallel.local_part import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class GPT(nn.Module):
    """A decoder-only transformer: pre-norm, learned positions, output weights tied to the embedding.

    Architecture and initialisation are those of GPT-2 (Radford et al. 2019): normal weights of deviation 0.02, divided
    by sqrt(2 * num_layers) in layers that add to the residual stream.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        context_length: most tokens in one forward.
        num_layers: transformer blocks.
        num_heads: attention heads; their number must divide the width.
        width: of the residual stream.
        dropout: probability, on embeddings, attention and residual branches.

    With `parallel.tensor_degree` above 1, each rank has some of the attention heads, of the features between the layers
    of a block, and of the embedding's tokens. Between the blocks, it has some of the positions. The logits are a
    DTensor whose last dimension the ranks divide.

    Raises:
        ConfigError: the heads don't divide the width.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        context_length: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ConfigError(
                "model.num_heads", num_heads, f"doesn't divide model.width={width}", "choose a divisor of the width"
            )
        self.context_length = context_length
        self.num_heads = num_heads
        self.tokens = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(context_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = _Head()
        self._initialise(0.02, 0.02 / math.sqrt(2 * num_layers))

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [n, length, vocab_size] of the next token at every position of int64 tokens [n, length].

        Args:
            tokens: int64 of shape [n, length].
            documents: int64 of shape [n, length], the number of each token's document, of several packed into a
                sequence: a token sees only its own document, in which positions begin at 0. None: each row is one.

        Raises:
            TaskError: more tokens than the context length.
        """
        length = tokens.shape[1]
        if length > self.context_length:
            raise TaskError(
                f"the model got {length} tokens, but model.context_length={self.context_length}: "
                f"set model.context_length={length} or more"
            )
        # stages of the model after the first one get what the one before has computed
        stream, added = tokens, 0
        if self.places:
            stream, documents, added = self._embed(tokens, documents)
        mask = None if documents is None else _causal_within(documents)
        for block in self.blocks:
            stream = block(stream, mask)
        if not self.norm:
            if added:
                raise TaskError(
                    f"the model got {length} tokens, whose number parallel.tensor_degree must divide if "
                    "parallel.pipeline_degree is more than 1"
                )
            return stream
        logits: Tensor = self.head(self.norm(stream), self.tokens.weight)
        return logits[:, : logits.shape[1] - added] if added else logits

    def pipeline_plan(self) -> list[str | tuple[str, ...]]:
        """Return the modules between which the model may be cut into stages; first and last share the embedding."""
        return [("tokens", "places", "dropout"), "blocks.*", ("norm", "head", "tokens")]

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """Return the styles by which ranks compute each layer together (`parallel.tensor_degree`)."""
        # importing the styles takes half a second
        from hpctrain.models.gpt_plan import tensor_parallel_plan

        return tensor_parallel_plan(self.num_heads)

    def _embed(self, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
        """Return the stream that enters the first block, the documents, and the number of tokens that were appended."""
        length = tokens.shape[1]
        if is_dtensor(self.places.weight):
            tokens, documents, places = self._for_several_ranks(tokens, documents)
        elif documents is None:
            places = self.places.weight[:length]
        else:
            places = self.places(_places_within(documents))
        return self.dropout(self.tokens(tokens) + places), documents, tokens.shape[1] - length

    def _for_several_ranks(self, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return tokens and documents whose positions the ranks divide evenly, and the places of this rank's own.

        What is appended comes last, so that no other token sees it.
        """
        weight: Any = self.places.weight
        tokens = F.pad(tokens, (0, -tokens.shape[1] % weight.device_mesh.size()))
        if documents is None:
            numbers = torch.arange(tokens.shape[1], device=tokens.device)[None]
        else:
            documents = F.pad(documents, (0, tokens.shape[1] - documents.shape[1]), value=-1)
            numbers = _places_within(documents)
        return tokens, documents, self.places(numbers.clamp(max=self.context_length - 1))

    def _initialise(self, deviation: float, residual_deviation: float) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith("out.weight")
                nn.init.normal_(parameter, std=residual_deviation if residual else deviation)


def _causal_within(documents: Tensor) -> Tensor:
    """Mask [n, 1, length, length] of the tokens that a token sees: those before it in its document."""
    same_document = documents[:, :, None] == documents[:, None, :]
    return same_document.tril()[:, None]


def _places_within(documents: Tensor) -> Tensor:
    """The place [n, length] of each token in its document."""
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.zeros_like(documents)
    begins[:, 1:] = torch.where(documents[:, 1:] != documents[:, :-1], places[1:], 0)
    return places - begins.cummax(1).values


class _Head(nn.Module):
    """The product with the embedding's weights: a module, so that a plan can divide it among ranks."""

    def forward(self, stream: Tensor, weight: Tensor) -> Tensor:
        return F.linear(stream, weight)


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, stream: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = stream.shape
        # a rank may have some of the heads
        heads = self.qkv(stream).view(batch, length, 3, -1, width // self.num_heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        # the function drops values in evaluation mode as well
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class _FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        out: Tensor = self.out(F.gelu(self.into(stream), approximate="tanh"))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, num_heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = _FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor, mask: Tensor | None = None) -> Tensor:
        stream = stream + self.dropout(self.attention(self.attention_norm(stream), mask))
        out: Tensor = stream + self.dropout(self.feed_forward(self.feed_forward_norm(stream)))
        return out
