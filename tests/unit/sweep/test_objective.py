import pytest
from omegaconf import OmegaConf

from hpctrain.errors import ConfigError, RunFailedError
from hpctrain.run.evaluation import EvaluationRecord
from hpctrain.run.score import Score
from hpctrain.sweep.objective import objective, sweeper_mode


@pytest.mark.parametrize(
    ("configuration", "mode"),
    [
        ({"direction": "minimize"}, "min"),  # hydra-optuna-sweeper
        ({"direction": ["maximize"]}, "max"),
        ({"ax_config": {"experiment": {"minimize": True}}}, "min"),  # hydra-ax-sweeper
        ({"optim": {"maximize": True}}, "max"),  # hydra-nevergrad-sweeper
        ({"optim": {"maximize": False}}, "min"),
        ({"times": 3}, None),
    ],
)
def test_the_direction_of_known_sweepers(configuration, mode):
    assert sweeper_mode(OmegaConf.create(configuration)) == mode


def test_the_objective_is_the_best_value(directory):
    directory.claim(1).mkdir()
    with pytest.raises(RunFailedError, match="has no value of the metric that ranks its evaluations; give the task"):
        objective(directory, 0, "max")
    EvaluationRecord(step=4, best=Score("f1", "max", 0.75), best_step=2).write(directory.claim(1))
    assert objective(directory, 0, "max") == 0.75
    with pytest.raises(ConfigError, match="higher values of the runs' metric are better"):
        objective(directory, 0, "min")
    with pytest.raises(RunFailedError, match="ended with exit code 4"):
        objective(directory, 4, "max")
