import pytest

from hpctrain.config.root import decides_the_weights


@pytest.mark.parametrize(
    "key",
    [
        "precision.kind",
        "precision.initial_loss_scale",
        "precision.loss_scale_growth_steps",
        "trainer.clip_grad_norm",
        "trainer.clip_grad_value",
        "parallel.gradient_compression",
        "optimizer.lr_scaling",
        "optimizer.no_decay_norm_bias",
        "schedule.drop_at_steps",
        "trainer.sync_batchnorm",
        "trainer.micro_batch_size",
        "trainer.compile",
        "trainer.compile_mode",
        "trainer.channels_last",
        "parallel.kind",
        "parallel.bucket_cap_mb",
        "parallel.find_unused_parameters",
    ],
)
def test_what_makes_another_run(key):
    assert decides_the_weights(key)


@pytest.mark.parametrize(
    "key",
    [
        "precision.min_loss_scale",
        "trainer.activation_checkpointing",
        "trainer.deterministic",
        "trainer.cudnn_benchmark",
        "trainer.log_grad_norm",
        "parallel.static_graph",
        "cluster.gpus_per_process",
        "nodes",
    ],
)
def test_what_may_change_on_the_way(key):
    assert not decides_the_weights(key)
