"""Models that are compiled, recompute their activations, are ordered channels-last, or are on several ranks or GPUs."""

from __future__ import annotations

import json
import os

import pytest
import torch

from tests.gpu.programs.gpu_tasks import ON_CPU

pytestmark = pytest.mark.gpu
DRESSED = [
    ["trainer.channels_last=true"],
    ["trainer.channels_last=true", "precision=bf16", "trainer.compile=true"],
    ["trainer.compile=true", "precision=fp16_master"],
    ["task=text", "trainer.activation_checkpointing=[blocks.*]", "trainer.compile=true", "precision=bf16"],
    *([] if ON_CPU else [["parallel=data_parallel"]]),
    ["data.num_workers=2", "data.pin_memory=true"],
    ["trainer.clip_grad_norm=1.0", "trainer.clip_grad_value=0.5", "trainer.ema_decay=0.9"],
]


@pytest.fixture(scope="module")
def dressed(shells, at_once):
    """A run with each of them."""
    more = ["trainer.max_steps=40", "logger.every_steps=10"]
    at_once(lambda words: shells(" ".join(words)).train(*words, *more), DRESSED)
    return shells


@pytest.mark.parametrize("words", DRESSED, ids=" ".join)
def test_it_learns_however_the_model_is_dressed(words, dressed):
    shell = dressed(" ".join(words))
    assert shell.inspected["step"] == 40
    found = shell.logged("train/loss")
    assert found[-1] < found[0]


def test_recomputed_activations_change_no_bit_and_take_less_memory(shells, at_once):
    words = ["task=text", "model.dropout=0.2", "trainer.deterministic=true", "trainer.max_steps=5"]

    def train(job):
        name, more = job
        shell = shells(name)
        shell.train(*words, *more)
        tried, _ = shell.type("fit-batch", *words, *more, "--largest", "1", "--json")
        return shell.digest, json.loads(tried)["trials"][0]["peak_bytes"]

    jobs = [("kept", []), ("recomputed", ["trainer.activation_checkpointing=[blocks.*]"])]
    (digest, peak), (other, less) = at_once(train, jobs)
    assert digest == other
    assert less <= peak


@pytest.mark.core
@pytest.mark.needs_cuda("torch synchronises batch norm on GPUs only")
def test_two_ranks_share_a_gpu_over_gloo_with_synchronised_batch_norm(shell):
    words = ["cluster.processes_per_node=2", "parallel.backend=gloo", "trainer.sync_batchnorm=true"]
    shell.train(*words, "trainer.max_steps=20")
    assert shell.inspected["step"] == 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_data_parallel_over_all_gpus_says_why_ddp_is_faster(shell):
    shell.environ.pop("CUDA_VISIBLE_DEVICES")
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        shell.environ["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    printed, _ = shell.train("parallel=data_parallel", "trainer.max_steps=20")
    assert shell.inspected["step"] == 20
    assert "parallel=ddp" in printed
