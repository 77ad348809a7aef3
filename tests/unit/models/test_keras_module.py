from __future__ import annotations

import copy
import importlib.util
import sys
from typing import Any

import pytest
import torch

from hpctrain.errors import ConfigError, TaskError
from hpctrain.models.keras_module import KerasModule, import_keras, stable_names
from hpctrain.parallel.ddp import synchronise_batchnorm

if importlib.util.find_spec("keras") is None:
    pytest.skip('pip install "hpctrain[keras]"', allow_module_level=True)
keras: Any = None


@pytest.fixture(scope="module", autouse=True)
def _import_it() -> None:
    """Not at collection, where every pytest worker would take four seconds for it."""
    globals()["keras"] = import_keras()


def small(dropout: float = 0.0, l2: float = 0.0) -> Any:
    inputs = keras.Input(shape=(3,))
    penalty = keras.regularizers.L2(l2) if l2 else None
    hidden = keras.layers.Dense(4, use_bias=False, kernel_regularizer=penalty)(inputs)
    hidden = keras.layers.BatchNormalization(momentum=0.5)(hidden)
    hidden = keras.layers.Dropout(dropout)(hidden)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


def test_trainable_variables_are_parameters_and_all_else_is_a_buffer() -> None:
    for _ in range(2):  # Keras calls the second model's layers dense_2 and dense_3
        module = KerasModule(small)
        names = [
            "dense/kernel",
            "batch_normalization/gamma",
            "batch_normalization/beta",
            "dense_1/kernel",
            "dense_1/bias",
        ]
        assert [name for name, _ in module.named_parameters()] == names
        assert all(parameter.requires_grad for parameter in module.parameters())
        statistics = ["batch_normalization/moving_mean", "batch_normalization/moving_variance"]
        assert [name for name, _ in module.named_buffers()][:2] == statistics
        assert not list(module.children())


def test_the_mode_of_the_module_decides() -> None:
    module, inputs = KerasModule(lambda: small(dropout=0.5)), torch.randn(16, 3)
    mean = module.get_buffer("batch_normalization/moving_mean")
    module.eval()
    assert torch.equal(module(inputs)[0], module(inputs)[0])
    assert not mean.any()
    module.train()
    assert not torch.equal(module(inputs)[0], module(inputs)[0])
    assert mean.any()


def test_buffers_and_keras_variables_are_one() -> None:
    """Also after a state dict was loaded, DDP wrote into a buffer, or the module was moved."""
    module = KerasModule(small)
    (model,) = module._model
    variable = next(v for v in model.non_trainable_variables if v.path.endswith("moving_mean"))
    other = KerasModule(small)
    other.train()(torch.randn(8, 3) + 1)
    for change in (
        lambda: module.load_state_dict(other.state_dict()),
        lambda: module.get_buffer("batch_normalization/moving_mean").fill_(3.0),
        lambda: module._apply(lambda tensor: tensor.clone() + 1),
        lambda: module.train()(torch.randn(8, 3)),
    ):
        before = variable.value.clone()
        change()
        assert torch.equal(variable.value, module.get_buffer("batch_normalization/moving_mean"))
        assert not torch.equal(variable.value, before)
    module.eval()
    other.load_state_dict(module.state_dict())
    inputs = torch.randn(4, 3)
    assert torch.equal(module(inputs)[0], other.eval()(inputs)[0])


def test_the_models_own_losses_are_returned_with_a_gradient() -> None:
    module = KerasModule(lambda: small(l2=0.5))
    _, losses = module(torch.randn(4, 3))
    kernel = module.get_parameter("dense/kernel")
    torch.testing.assert_close(losses, 0.5 * kernel.detach().square().sum())
    losses.backward()
    torch.testing.assert_close(kernel.grad, kernel.detach())
    assert KerasModule(small)(torch.randn(4, 3))[1] == 0


def test_what_keras_models_do_not_support_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.sync_batchnorm=True: KerasModule has no batch norm of torch\.nn"):
        synchronise_batchnorm(KerasModule(small))
    with pytest.raises(
        TaskError, match=r"dense/kernel became torch\.bfloat16, but Keras still computes .*precision=fp32"
    ):
        KerasModule(small).to(torch.bfloat16)
    with pytest.raises(TaskError, match=r"can't be copied .*precision=fp32"):
        copy.deepcopy(KerasModule(small))
    with pytest.raises(TaskError, match="has no variables yet"):
        KerasModule(lambda: keras.Sequential([keras.layers.Dense(3)]))
    module = KerasModule(small)
    module._parameters.clear()  # as nn.DataParallel's replicas are
    with pytest.raises(TaskError, match="use parallel=ddp"):
        module(torch.randn(4, 3))


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(ConfigError, match=r"KERAS_BACKEND=jax: .*set KERAS_BACKEND=torch"):
            import_keras()
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    with pytest.raises(ConfigError, match="KERAS_BACKEND=tensorflow"):
        import_keras()


def test_names_depend_on_the_order_within_the_model_alone() -> None:
    paths = ["net_7/dense_4/kernel", "net_7/dense_4/bias", "net_7/dense_9/kernel", "net_8/dense_1/kernel", "a.b/c"]
    assert stable_names(paths) == [
        "net/dense/kernel",
        "net/dense/bias",
        "net/dense_1/kernel",
        "net_1/dense/kernel",
        "a_b/c",
    ]
    with pytest.raises(TaskError, match="2 variables of the Keras model are called a/b"):
        stable_names(["a/b", "c", "a/b"])
