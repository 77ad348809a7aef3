"""Checks across groups. What each impossible combination prints is in tests/contracts/test_bad_configurations.py."""

import pytest

from hpctrain.config.checks import check, warnings_of
from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer():
    return Composer()


def test_ranks_that_already_run_decide_how_many_there_are(composer):
    config = composer.compose(["cluster=slurm", "nodes=2"])
    check(config, {}, world_size=4)
    with pytest.raises(ConfigError, match="cannot be divided among 3 ranks"):
        check(config, {}, world_size=3)


def test_data_that_this_machine_does_not_have(tmp_path, composer):
    words = ["task=tokens", "model=gpt", "task.context_length=8", f"task.data={tmp_path / 'nowhere'}"]
    with pytest.raises(ConfigError, match=r"task\.data=\S+/nowhere: is not a folder"):
        composer.compose(words)
    (warning,) = warnings_of(composer.compose([*words, "cluster=slurm"]))
    assert "nowhere is not a folder on this machine: it must exist on the nodes" in warning
    assert warnings_of(composer.compose([*words, f"task.data={tmp_path}", "cluster=slurm"])) == []


def test_a_warm_up_that_outlasts_the_run_and_a_gpu_partition_without_gpus_are_warned_of(composer):
    assert warnings_of(composer.compose(["cluster=slurm", "cluster.partition=cpu", "schedule.warmup_steps=9"])) == []
    words = ["cluster=slurm", "cluster.partition=GPU-long", "schedule.warmup_steps=9", "trainer.max_steps=9"]
    warm_up, partition = warnings_of(composer.compose(words))
    assert warm_up == "schedule.warmup_steps=9 does not end before trainer.max_steps=9"
    assert partition.startswith("cluster.partition=GPU-long looks like a GPU partition, but the run requests no GPU")
    assert warnings_of(composer.compose([*words[:2], "cluster.gpus_per_node=0"])) == []


def test_keys_of_optimizers_that_change_nothing_are_reported(composer):
    words = [
        "trainer.max_steps=5",
        "optimizer=named",
        "optimizer.named.a={_target_: torch.optim.SGD, groups: [{match: a, unfreeze_at_step: 5}]}",
        "optimizer.named.b={_target_: torch.optim.SGD, match: a, loss: loss_b, every_steps: 6, layer_decay_module: x}",
    ]
    config = composer.compose(["task=custom", "task._target_=torch.nn.Identity", *words])
    unfrozen, pace, module = warnings_of(config)
    assert unfrozen.startswith(
        "optimizer.named.a.groups[0].unfreeze_at_step=5 does not come before trainer.max_steps=5"
    )
    assert pace == "optimizer.named.b.every_steps=6 is more than trainer.max_steps=5: it never steps"
    assert module == "optimizer.named.b.layer_decay_module=x has no effect without optimizer.named.b.layer_decay"
    words = [
        "trainer.max_epochs=2",
        "optimizer.groups=[{match: a, unfreeze_at_epoch: 1.5}]",
        "optimizer.layer_decay=0.5",
    ]
    assert warnings_of(composer.compose(words)) == []
    (epoch,) = warnings_of(composer.compose([words[0], "optimizer.groups=[{match: a, unfreeze_at_epoch: 2}]"]))
    assert "unfreeze_at_epoch=2 does not come before trainer.max_epochs=2" in epoch
