from __future__ import annotations

import pytest
import torch

from hpctrain.config.compose import Composer
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.train.profiling.bottleneck import Measurements, RankReport, find_bottleneck

COMPUTE = {"data": 0.001, "forward": 0.03, "backward": 0.06, "gradient_sync": 0.001, "optimizer": 0.008}


@pytest.fixture(scope="module")
def config():
    return Composer().compose([])


@pytest.fixture(scope="module")
def slurm_config():
    return Composer().compose(["cluster=slurm"])


def rank(number=0, host="n1", *, growth_bytes=0.0, syncs=(), **parts):
    """A rank's mean step; parts in seconds replace those of a step of 0.1 s that computes."""
    return RankReport(
        rank=number,
        host=host,
        steps_timed=5,
        parts=COMPUTE | parts,
        growth_bytes=growth_bytes,
        syncs=dict(syncs),
    )


def measured(config, *reports, device="cpu", cores=1, **known):
    reports = reports or (rank(),)
    step_s = max(report.step_s for report in reports)
    usual = {"step": 1000, "steps": 999, "total_steps": 2000, "steps_per_epoch": 100, "train_s": 999 * step_s}
    usual["faster_precision"] = config.precision.formats.faster
    world = TrainingWorld(rank=0, size=len(reports), local_rank=0, devices=(torch.device(device),), cores=cores)
    return Measurements(config=config, world=world, reports=reports, **(usual | known))


def finding(config, *reports, **known):
    return found(measured(config, *reports, **known))[0]


def found(measurements):
    """The main finding, and the others."""
    bottleneck = find_bottleneck(measurements, flops_per_sample=None, mfu=None)
    return bottleneck.text, bottleneck.also


def test_nothing_but_the_models_own_compute(config):
    assert finding(config) == "nothing holds it back: the model's own compute takes 98% of the time"
    on_gpu = finding(config, device="cuda")
    assert on_gpu.endswith("; to make that faster: precision=bf16, trainer.compile=true")


def test_keys_that_make_the_compute_faster_are_named_even_if_it_takes_less_than_half_of_the_time(config):
    text = finding(config, device="cuda", train_s=200.0, steps_per_epoch=1)
    assert text == (
        "the model's own compute takes 49% of the time; to make that faster: precision=bf16, trainer.compile=true"
    )


def test_what_comes_once_says_nothing_about_a_longer_run(config):
    text = finding(config, eval_s=800.0, evaluations=1, save_s=100.0, saves=1)
    assert text == "too short to find a bottleneck: evaluating and saving once take 90% of the time"


def test_too_short_to_tell(config):
    short = Measurements(
        config=config,
        world=TrainingWorld(rank=0, size=1, local_rank=0, devices=(torch.device("cpu"),)),
        reports=[RankReport(rank=0, host="n1")],
        step=1,
        steps=0,
        total_steps=1,
        steps_per_epoch=1,
        train_s=0.0,
    )
    assert found(short) == ("too short to find a bottleneck: no step was timed", ())


@pytest.mark.parametrize(
    ("workers", "cores", "data", "here", "in_a_job"),
    [
        (0, 8, 0.2, "data.num_workers 0 -> 3", ""),
        (2, 8, 0.06, "data.num_workers 2 -> 4", ""),
        (2, 3, 0.3, "data.num_workers 2 -> 3, then a cheaper __getitem__", "cluster.cpus_per_process 3 -> 11, or "),
        (4, 4, 0.06, "a cheaper __getitem__", "cluster.cpus_per_process 4 -> 9, or "),
        (0, 1, 0.2, "a cheaper __getitem__", "cluster.cpus_per_process 1 -> 4, or "),
    ],
)
def test_waiting_for_data(config, slurm_config, workers, cores, data, here, in_a_job):
    """The cores of this machine are what they are; a job may request more."""
    head = f"waiting for data {data / (0.099 + data):.0%} of the time: "
    assert finding(config, rank(data=data), num_workers=workers, cores=cores) == head + here
    text = finding(slurm_config, rank(data=data), num_workers=workers, cores=cores)
    assert text == head + here.replace("a cheaper", f"{in_a_job}a cheaper")


def test_loading_processes_are_not_advised_where_they_only_cost(slurm_config):
    text = finding(slurm_config, rank(data=0.2), cores=8, more_workers_help=False)
    assert text == "waiting for data 67% of the time: a cheaper way to make a batch"


def test_a_loading_process_shares_a_core_only_with_a_gpu(config):
    assert "data.num_workers 0 -> 1" in finding(config, rank(data=0.2), cores=1, device="cuda")


def test_a_slow_rank_is_named_and_not_the_network(config, slurm_config):
    ranks = [rank(0, "n1", gradient_sync=0.081), rank(1, "n2", forward=0.11), rank(2, "n1", gradient_sync=0.08)]
    text, also = found(measured(config, *ranks))
    assert text == (
        "rank 1 on n2 takes 1.9 times as long as the others for its own part of a step, and they wait for it 44% of "
        "the time: check for other processes on that machine"
    )
    assert also == ()
    assert finding(slurm_config, *ranks).endswith("that machine, or cluster.exclude=n2")


def test_a_rank_whose_data_is_slow(config):
    ranks = [rank(0, "n1", gradient_sync=0.1), rank(1, "n2", data=0.1)]
    assert finding(config, *ranks).endswith("it waits for its data: check the file system that this machine reads from")


def test_sending_gradients(config):
    ranks = [rank(0, "n1", gradient_sync=0.1), rank(1, "n2", gradient_sync=0.11)]
    assert finding(config, *ranks, gradient_bytes=10**8) == (
        "sending gradients 49% of the time: parallel.gradient_compression none -> fp16, in a new run: it changes the "
        "weights; check that cluster.network_interface is the fast network"
    )
    assert "none -> bf16" in finding(config, *ranks, gradient_bytes=10**8, device="cuda")


def test_no_compression_where_nothing_is_left_to_compress(config):
    ranks = [rank(0, gradient_sync=0.1), rank(1, gradient_sync=0.11)]
    small = "sending gradients 49% of the time: with gradients of 772 B the model is small for 2 ranks; fewer may be as"
    assert finding(config, *ranks, gradient_bytes=4 * 193).startswith(small)
    for word in ("precision=bf16_pure", "precision=fp16_master", "parallel.gradient_compression=fp16"):
        half = Composer().compose([word])
        batch = "sending gradients 49% of the time: a larger trainer.global_batch_size has more work per sync, in a new"
        assert finding(half, *ranks, gradient_bytes=10**8).startswith(batch)
        whole_epoch = finding(half, *ranks, gradient_bytes=10**8, steps_per_epoch=1)
        assert whole_epoch.endswith("the model is small for 2 ranks; fewer may be as fast")
    gloo = Composer().compose(["parallel.backend=gloo"])
    assert "none -> fp16" in finding(gloo, *ranks, gradient_bytes=10**8, device="cuda")


def test_memory_that_grows_comes_first(config):
    text, also = found(measured(config, rank(growth_bytes=1.5e6, data=0.2), cores=8))
    assert text == (
        "memory grows by 1.5 MB with each step, 1.5 GB more by the last one: something keeps each step's graph, such "
        "as a list of losses: keep loss.detach() or loss.item() instead"
    )
    assert also[0].startswith("waiting for data")


def test_a_wait_for_the_gpu_is_named_by_its_line(config):
    text = finding(config, rank(syncs={"task.py:41": 1.0, "task.py:9": 0.1}), device="cuda")
    assert text.startswith("the host waits for the GPU in every step at task.py:41: an .item()")
    assert "nothing" in finding(config, rank(syncs={"task.py:9": 0.1}), device="cuda")


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({"eval_s": 60.0, "evaluations": 5}, "evaluating 38% of the time: trainer.eval_every_steps 100 -> 1200"),
        ({"eval_s": 60.0, "evaluations": 1}, "nothing holds it back"),
        ({"save_s": 60.0, "saves": 3}, "saving 38% of the time: checkpoint.auto=true"),
        ({"save_s": 60.0, "saves": 1}, "nothing holds it back"),
        (
            {"train_s": 200.0},
            "50% of the time is spent between the steps: steps are short; a larger trainer.global_batch_size has fewer",
        ),
        (
            {"agreement_s": 20.0},
            "the ranks wait for each other between steps 20% of the time: check that no rank shares its cores",
        ),
        # what already spans the run, or the data, can't be done more rarely
        ({"train_s": 200.0, "steps_per_epoch": 1}, "no key would make it faster: the model's own compute takes 49%"),
        (
            {"eval_s": 60.0, "evaluations": 5, "total_steps": 300},
            "evaluating 38% of the time: trainer.eval_every_steps 100 -> 300",
        ),
        ({"eval_s": 60.0, "evaluations": 2, "total_steps": 100}, "nothing holds it back"),
        ({"logging_s": 20.0, "total_steps": 10}, "nothing holds it back"),
        ({"logging_s": 20.0}, "writing metrics 20% of the time: logger.every_steps 10 -> 48"),
    ],
)
def test_what_is_done_between_steps(config, known, text):
    assert finding(config, **known).startswith(text)


def test_saves_by_steps_and_saves_that_training_waits_for(config):
    config.checkpoint.every_steps = 10
    assert finding(config, save_s=30.0, saves=9) == "saving 23% of the time: checkpoint.every_steps 10 -> 58"
    assert "nothing holds it back" in finding(config, save_s=30.0, saves=9, total_steps=10)
    config.checkpoint.asynchronous = False
    assert finding(config, save_s=30.0, saves=9) == "saving 23% of the time: checkpoint.asynchronous false -> true"
    config.checkpoint.every_steps, config.checkpoint.asynchronous = None, True


def test_saves_that_are_weighed_already(config):
    auto = Composer().compose(["checkpoint.auto=true"])
    assert finding(auto, save_s=30.0, saves=9) == "saving 23% of the time: a run_dir on a faster file system"


def test_a_device_that_is_not_faster_in_another_precision(config):
    assert finding(config, device="cuda", faster_precision="").endswith("to make that faster: trainer.compile=true")


def test_an_optimizer_that_is_fast_in_another_way():
    foreach = Composer().compose(["optimizer.foreach=true"])
    assert "fused" not in finding(foreach, rank(optimizer=0.1))


def test_an_optimizer_that_could_be_faster(config):
    assert finding(config, rank(optimizer=0.1)) == "the optimizer takes 52% of the time: optimizer.fused null -> true"


def test_an_optimizer_that_the_user_wants_slow(config):
    config.optimizer["fused"] = False
    assert "fused" not in finding(config, rank(optimizer=0.1))
