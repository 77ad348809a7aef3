import pytest

from hpctrain.config.optimizer import SGD, AdamW, ParameterOptions, parameter_options
from hpctrain.errors import ConfigError


def test_what_hpctrain_handles_itself_is_taken_out_of_the_arguments():
    node = {"_target_": "torch.optim.SGD", "lr": 0.1, "lr_scaling": "sqrt", "no_decay_norm_bias": True}
    assert parameter_options(node) == ParameterOptions(lr_scaling="sqrt", no_decay_norm_bias=True)
    assert parameter_options({"lr": 0.1}) == ParameterOptions()


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_one_way_to_update_several_parameters_at_once(kind):
    assert kind(fused=True, foreach=False).fused
    with pytest.raises(ConfigError, match=r"optimizer\.fused=True: conflicts with optimizer\.foreach=True"):
        kind(fused=True, foreach=True)
