from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.callbacks.log_images import LogImages
from hpctrain.callbacks.log_text import LogText
from hpctrain.callbacks.log_weights import LogWeights
from hpctrain.errors import TaskError


class Counting(nn.Module):
    """Predicts that each token is followed by the next number, out of ten."""

    def forward(self, tokens):
        return nn.functional.one_hot((tokens + 1) % 10, 10) * 50.0


def test_norms_and_histograms_of_weights_and_unscaled_gradients(training):
    watched = training()
    watched.scale = 4.0
    watched.model.weight.data.fill_(3.0)
    watched.model.weight.grad = torch.full((1, 2), 8.0)
    callback = LogWeights(every_steps=2, match="w*")
    callback.after_backward(watched)
    assert watched.log.scalars == {}
    watched.position.step = 1
    callback.after_backward(watched)
    norms = {"weights/weight/norm": pytest.approx(18**0.5), "gradients/weight/norm": pytest.approx(8**0.5)}
    assert watched.log.scalars == norms
    kinds = {name: (kind, values.tolist()) for name, (kind, values) in watched.log.media.items()}
    assert kinds["gradients/weight"] == ("histogram", [[2.0, 2.0]])
    without = training()
    without.model.weight.grad = torch.ones(1, 2)
    LogWeights(1, histograms=False).after_backward(without)
    assert without.log.media == {}


def test_pictures_and_what_is_predicted_for_them(training):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    watched = training(model=model, batch=(torch.randn(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1])))
    LogImages(3).after_evaluation(watched, {})
    kind, pictures = watched.log.media["images"]
    assert (kind, pictures.shape) == ("image", (3, 1, 2, 2))
    assert (pictures.amin().item(), pictures.amax().item()) == (0.0, 1.0)
    kind, rows = watched.log.media["predictions"]
    assert (kind, [row[:2] for row in rows]) == ("table", [(0, 0), (1, 1), (2, 2)])


def test_what_isnt_pictures_is_refused(training):
    with pytest.raises(TaskError, match="log_images expects"):
        LogImages().after_evaluation(training(batch=(torch.zeros(2, 3), torch.zeros(2))), {})


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_text_is_continued_and_decoded(training, temperature):
    watched = training(model=Counting(), batch=(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.zeros(2, 4)))
    LogText(2, 2, 3, temperature).after_evaluation(watched, {})
    assert watched.log.media["text_0"] == ("text", "1 2\n\n---\n\n3 4 5")
    watched.task = SimpleNamespace(decode=lambda tokens: "".join(map(str, tokens)))
    LogText(1, 2, 2, temperature).after_evaluation(watched, {})
    assert watched.log.media["text_0"] == ("text", "12\n\n---\n\n34")


def test_what_isnt_tokens_is_refused(training):
    with pytest.raises(TaskError, match="log_text expects"):
        LogText().after_evaluation(training(batch=(torch.zeros(2, 3), torch.zeros(2))), {})


@pytest.mark.parametrize("callback", [LogImages(), LogText()])
def test_without_held_out_samples_nothing_is_logged(training, callback):
    watched = training()
    callback.after_evaluation(watched, {})
    assert watched.log.media == {}
