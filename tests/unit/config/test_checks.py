"""Checks across groups. What each impossible combination prints is in tests/contracts/test_bad_configurations.py."""

import pytest

from hpctrain.config.checks import check, check_batch, check_divisible, warnings_of
from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "message"),
    [
        (64, None, 4, None),
        (64, 8, 4, None),
        (64, None, 3, "cannot be divided among 3 ranks; set it to 63 or 66, or run 1, 2, 4, 8 or 16 processes"),
        (64, 24, 2, "cannot be divided among 2 ranks with micro-batches of 24; set it to 48 or 96"),
        (2, None, 3, "cannot be divided among 3 ranks; set it to 3, or run 1 or 2 processes"),
        (1, None, 2, "cannot be divided among 2 ranks; set it to 2, or run 1 process"),
        (3, 2, 1, "cannot be divided among 1 rank with micro-batches of 2; set it to 2 or 4"),
        (3, 2, 2, "cannot be divided among 2 ranks with micro-batches of 2; set it to 4"),
    ],
)
def test_the_ranks_divide_the_global_batch(global_batch_size, micro_batch_size, world_size, message):
    if message is None:
        check_divisible(global_batch_size, micro_batch_size, world_size)
        return
    with pytest.raises(ConfigError) as caught:
        check_divisible(global_batch_size, micro_batch_size, world_size)
    assert str(caught.value) == f"trainer.global_batch_size={global_batch_size}: {message}"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_cuda_graphs_do_not_accumulate(composer, mode):
    compiled = ["trainer.compile=true", f"trainer.compile_mode={mode}", "trainer.micro_batch_size=16"]
    config = composer.compose(["cluster=slurm", "nodes=4", *compiled])
    check_batch(config, 4)
    if mode == "default":
        check_batch(config, 2)
        return
    # ranks that torchrun started, fewer than the configuration asks for
    with pytest.raises(ConfigError) as caught:
        check_batch(config, 2)
    assert str(caught.value) == (
        f"trainer.compile_mode={mode}: uses CUDA graphs, which overwrite the gradients of earlier micro-batches, and a "
        "step has 2 micro-batches; set trainer.micro_batch_size=32, a rank's whole share of a step, or "
        "trainer.compile_mode=default"
    )
    composer.compose(["cluster=slurm", "nodes=2", *compiled[:2]])


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
