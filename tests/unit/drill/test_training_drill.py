from __future__ import annotations

from hpctrain.config.compose import Composer
from hpctrain.drill.training_drill import overrides_of


def test_what_is_typed_counts_more_than_what_a_drill_sets():
    config = Composer().compose(overrides_of(["trainer.max_steps=7", "cluster.wait=true"], gpus=True))
    assert (config.trainer.max_steps, config.trainer.max_epochs, config.trainer.deterministic) == (7, None, True)
    assert config.cluster.env == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert not config.cluster.wait


def test_a_drill_on_gpus_is_deterministic_whatever_the_experiment_sets(tmp_path):
    """Its file comes before what a drill sets, and what is typed after it."""
    (tmp_path / "experiment").mkdir()
    lines = "# @package _global_", "trainer:", "  cudnn_benchmark: true", ""
    (tmp_path / "experiment" / "fast.yaml").write_text("\n".join(lines))
    config = Composer(str(tmp_path)).compose(overrides_of(["experiment=fast"], gpus=True))
    assert (config.trainer.deterministic, config.trainer.cudnn_benchmark) == (True, False)
