from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import ConfigError
from hpctrain.files import write_json
from hpctrain.tasks.tokens import Tokens


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, length in (("train", 100), ("eval", 20)):
        (tmp_path / f"{name}.bin").write_bytes((np.arange(length) % 50).astype("<u2").tobytes())
    write_json(tmp_path / "tokens.json", {"vocab_size": 50, "dtype": "uint16"})
    return tmp_path


class Uniform(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, 50)


def test_a_uniform_guess_has_the_vocabulary_as_its_perplexity(data: Path) -> None:
    task = Tokens(str(data), context_length=9, vocab_size=50)
    batch = task.eval_dataset().get_batch(torch.arange(2))
    total, count = task.evaluate(Uniform(), batch)["loss"]
    assert count == 18
    assert task.loss(Uniform(), batch).item() == pytest.approx(math.log(50))
    assert task.derive({"loss": float(total) / count}) == {"perplexity": pytest.approx(50)}
    assert task.derive({"loss": 800.0}) == {"perplexity": math.inf}
    assert math.isnan(task.derive({"loss": math.nan})["perplexity"])


def test_the_default_model_has_the_vocabulary_of_the_tokens(data: Path) -> None:
    task = Tokens(str(data), context_length=9)
    model = task.build_model()
    assert (model.tokens.num_embeddings, model.context_length) == (50, 9)
    loss = task.loss(model, task.train_dataset().get_batch(torch.arange(3)))
    assert loss.item() == pytest.approx(math.log(50), abs=0.3)
    (data / "tokens.json").unlink()
    with pytest.raises(ConfigError, match=r"task\.vocab_size=null: needed, since there is no \S+tokens\.json"):
        Tokens(str(data)).build_model()


def test_more_tokens_than_the_models_are_refused_at_once(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size=40: .*set model\.vocab_size=50"):
        Tokens(str(data), context_length=9, vocab_size=40).train_dataset()


def test_files_are_found_by_their_names(data: Path) -> None:
    assert Tokens(str(data), eval=None).eval_dataset() is None
    (data / "eval.bin").rename(data / "val.bin")
    assert len(Tokens(str(data), eval="val*", context_length=9).eval_dataset()) == 2
    with pytest.raises(ConfigError, match=r"task\.eval=eval\*: .* holds tokens\.json, train\.bin, val\.bin"):
        Tokens(str(data), context_length=9).eval_dataset()
