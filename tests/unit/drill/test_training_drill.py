from __future__ import annotations

from hpctrain.config.compose import Composer
from hpctrain.drill.training_drill import overrides_of


def test_what_is_typed_counts_more_than_what_a_drill_sets():
    config = Composer().compose(overrides_of(["trainer.max_steps=7", "cluster.wait=true"], gpus=True))
    assert (config.trainer.max_steps, config.trainer.max_epochs, config.trainer.deterministic) == (7, None, True)
    assert config.cluster.env == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert not config.cluster.wait
