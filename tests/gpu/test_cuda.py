"""What only a GPU can show, skipped without CUDA: a rank with its device, precisions, the scaler, determinism."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA on this machine: nothing of tests/gpu was run"),
]
PRECISIONS = ["fp32", "tf32", "bf16", "fp16", "bf16_pure", "fp16_master"]


def hpctrain(folder, *words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def train(folder, *overrides):
    said = hpctrain(folder, "run_dir=R", "logger.tensorboard=false", *overrides)
    return {"said": said, **json.loads(hpctrain(folder, "inspect", "R", "--json"))}


def logged(folder, name):
    records = [json.loads(line) for line in (folder / "R" / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def weights(folder, step):
    return torch.load(folder / "R" / "checkpoints" / f"step_{step:08}" / "model.pt", weights_only=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_learns_in_every_precision(precision, tmp_path):
    assert train(tmp_path, f"precision={precision}", "trainer.max_steps=60")["step"] == 60
    found = logged(tmp_path, "train/loss")
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure", "fp16_master"])
def test_the_checkpoint_is_on_the_cpu_in_the_format_that_is_trained(precision, tmp_path):
    train(tmp_path, "trainer.max_steps=5", f"precision={precision}")
    model = weights(tmp_path, 5)
    assert {value.device.type for value in model.values()} == {"cpu"}
    expected = torch.bfloat16 if precision == "bf16_pure" else torch.float32
    assert {value.dtype for value in model.values() if value.is_floating_point()} == {expected}


@pytest.mark.parametrize("precision", ["fp16", "fp16_master"])
@pytest.mark.parametrize("fused", ["true", "false"])
def test_updates_that_overflow_are_skipped_and_the_scale_is_logged(precision, fused, tmp_path):
    words = ["precision.initial_loss_scale=1e9", f"optimizer.fused={fused}", "logger.every_steps=10"]
    train(tmp_path, f"precision={precision}", *words, "trainer.max_steps=40")
    assert logged(tmp_path, "train/skipped_updates")[-1] > 0
    assert logged(tmp_path, "train/loss_scale")[-1] < 1e9
    found = logged(tmp_path, "train/loss")
    assert found[-1] < found[0]


def test_a_scale_that_collapses_stops_the_run(tmp_path):
    words = ["precision=fp16", "precision.initial_loss_scale=1e30", "precision.min_loss_scale=1e29", "run_dir=R"]
    hpctrain(tmp_path, *words, "trainer.max_steps=100", "logger.every_steps=10", code=1)
    end = json.loads((tmp_path / "R" / "attempts.jsonl").read_text().splitlines()[-1])
    assert end["reason"] == "failed"
    assert "the loss scale fell to" in end["detail"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_deterministic_runs_are_bit_equal_and_so_is_an_interrupted_one(precision, tmp_path):
    words = ["trainer.deterministic=true", f"precision={precision}", "schedule=constant"]
    digests = set()
    for name, stops in (("a", [20]), ("b", [20]), ("c", [7, 20])):
        (tmp_path / name).mkdir()
        for stop in stops:
            found = train(tmp_path / name, *words, f"trainer.max_steps={stop}")
        digests.add(found["weights_digest"])
    assert len(digests) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.channels_last=true"],
        ["trainer.channels_last=true", "precision=bf16", "trainer.compile=true"],
        ["trainer.compile=true", "precision=fp16_master"],
        ["task=text", "trainer.activation_checkpointing=[blocks.*]", "trainer.compile=true", "precision=bf16"],
        ["parallel=data_parallel"],
        ["data.num_workers=2", "data.pin_memory=true"],
        ["trainer.clip_grad_norm=1.0", "trainer.clip_grad_value=0.5", "trainer.ema_decay=0.9"],
    ],
    ids=" ".join,
)
def test_it_learns_however_the_model_is_dressed(words, tmp_path):
    assert train(tmp_path, *words, "trainer.max_steps=40", "logger.every_steps=10")["step"] == 40
    found = logged(tmp_path, "train/loss")
    assert found[-1] < found[0]


def test_recomputed_activations_change_no_bit_and_take_less_memory(tmp_path):
    words = ["task=text", "model.dropout=0.2", "trainer.deterministic=true", "trainer.max_steps=5"]
    digests, peaks = set(), []
    for name, more in (("a", []), ("b", ["trainer.activation_checkpointing=[blocks.*]"])):
        (tmp_path / name).mkdir()
        digests.add(train(tmp_path / name, *words, *more)["weights_digest"])
        said = hpctrain(tmp_path / name, "fit-batch", *words, *more, "--largest", "1", "--json")
        peaks.append(json.loads(said)["trials"][0]["peak_bytes"])
    assert len(digests) == 1
    assert peaks[1] <= peaks[0]


def test_two_ranks_share_a_gpu_over_gloo_with_synchronised_batch_norm(tmp_path):
    words = ["cluster.processes_per_node=2", "parallel.backend=gloo", "trainer.sync_batchnorm=true"]
    assert train(tmp_path, *words, "trainer.max_steps=20")["step"] == 20


def test_fit_batch_finds_a_size_and_leaves_nothing_behind(tmp_path):
    found = json.loads(hpctrain(tmp_path, "fit-batch", "task=text", "--memory-gb", "4", "--json"))
    assert found["largest"] >= 1
    assert all(trial["peak_bytes"] <= 4e9 for trial in found["trials"] if trial["fits"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_data_parallel_over_all_gpus_says_why_ddp_is_faster(tmp_path):
    found = train(tmp_path, "parallel=data_parallel", "trainer.max_steps=20")
    assert found["step"] == 20
    assert "parallel=ddp" in found["said"]


def test_a_resumed_run_goes_on_from_the_checkpoint(tmp_path):
    train(tmp_path, "trainer.max_steps=10", "precision=fp16")
    assert train(tmp_path, "trainer.max_steps=20", "precision=fp16")["step"] == 20


@pytest.mark.parametrize("fused", [("false", "true"), ("true", "false")], ids=" to ".join)
def test_a_run_goes_on_with_another_kernel_for_its_updates(fused, tmp_path):
    for words in ([f"optimizer.fused={fused[0]}"], [f"optimizer.fused={fused[1]}", "resume.allow_config_change=true"]):
        found = train(tmp_path, *words, "schedule=constant", f"trainer.max_steps={10 * len(words)}")
    assert found["step"] == 20
    state = torch.load(tmp_path / "R" / "checkpoints" / "step_00000020" / "optimizer.pt", weights_only=True)["state"]
    assert {entry["step"].item() for entry in state.values()} == {20}
