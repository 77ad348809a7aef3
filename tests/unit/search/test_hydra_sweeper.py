import pytest
from omegaconf import OmegaConf

from hpctrain.errors import ConfigError, RunFailedError
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.search.hydra_sweeper import Direction, objective, sweeper_direction


@pytest.mark.parametrize(
    ("configuration", "found"),
    [
        ({"direction": "minimize"}, ("direction", "minimize", "min")),  # hydra-optuna-sweeper
        ({"direction": ["maximize"]}, ("direction", "maximize", "max")),
        (
            {"ax_config": {"experiment": {"minimize": True}}},  # hydra-ax-sweeper
            ("ax_config.experiment.minimize", "true", "min"),
        ),
        ({"optim": {"maximize": True}}, ("optim.maximize", "true", "max")),  # hydra-nevergrad-sweeper
        ({"optim": {"maximize": False}}, ("optim.maximize", "false", "min")),
    ],
)
def test_the_direction_of_known_sweepers(configuration, found):
    assert sweeper_direction(OmegaConf.create(configuration)) == Direction(*found)


@pytest.mark.parametrize("configuration", [{"times": 3}, {"direction": "sideways"}])
def test_other_sweepers_have_no_known_direction(configuration):
    assert sweeper_direction(OmegaConf.create(configuration)) is None


MAXIMIZE = Direction("optim.maximize", "true", "max")
MINIMIZE = Direction("optim.maximize", "false", "min")


def test_the_objective_is_the_best_value(directory):
    ledger = Ledger(directory)
    ledger.start(ledger.claim(), job_id=None, nodes=[], world_size=1, step=0)
    with pytest.raises(RunFailedError, match="is still queued or running, by another command; type the command again"):
        objective(directory, 0, MAXIMIZE)
    ledger.end(1, reason=Reason.COMPLETED, step=4)
    with pytest.raises(RunFailedError, match="has no value of the metric by which it is judged; give the task"):
        objective(directory, 0, MAXIMIZE)
    EvaluationRecord(step=4, means={}, best=Score("f1", "max", 0.75), best_step=2).write(directory.attempt(1))
    assert objective(directory, 0, MAXIMIZE) == 0.75
    refused = (
        "optim.maximize=false: looks for lower values, but higher values of the runs' metric are better; set it to"
    )
    with pytest.raises(ConfigError, match=refused):
        objective(directory, 0, MINIMIZE)
    with pytest.raises(RunFailedError, match="ended with exit code 4; its log: python -m hpctrain logs "):
        objective(directory, 4, MAXIMIZE)
