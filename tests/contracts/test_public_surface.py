"""What users build on, as lists: changing one is a decision, and goes into docs/changelog.md."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

import hpctrain
from hpctrain import errors
from hpctrain.cli import COMMANDS, main
from hpctrain.config.compose import Composer
from hpctrain.config.parallel import OF_MESH, Parallel
from hpctrain.config.root import Config, ProgramConfig, flat
from hpctrain.errors import ExitCode
from hpctrain.run.checkpoint_manifest import FILES, is_known_name
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.status.state import RunState

COMMAND_WORDS = (
    "best cancel compare completion doctor drill env export fit-batch inspect logs report resume run stacks status "
    "sync top"
)
STATES = "prepared queued held starting running interrupted paused completed failed cancelled unknown unreadable"
REASONS = """
    completed preempted time_limit node_failure infrastructure hang failed out_of_memory cancelled interrupted stalled
    paused
"""
TOP_LEVEL_KEYS = """
    nodes seed name run_dir run_mode after after_failure init_from init_match init_strict
    cluster task model data optimizer schedule precision parallel trainer checkpoint logger callbacks health notify
    resume code
"""
KEYS_OF_PROGRAMS = "nodes name run_dir run_mode after after_failure cluster code health notify resume args run"
FIXED_KEYS = """
    trainer.max_steps trainer.max_epochs trainer.global_batch_size trainer.micro_batch_size trainer.sync_batchnorm
    trainer.deterministic checkpoint.every_steps checkpoint.every_min checkpoint.keep data.num_workers data.drop_last
    resume.allow_config_change health.hang_timeout_s
    cluster.wait cluster.dry_run cluster.gpus_per_node cluster.processes_per_node cluster.gpus_per_process
    cluster.cpus_per_process cluster.memory_gb cluster.time_limit_min cluster.partition cluster.account cluster.qos
    cluster.constraint cluster.exclude cluster.reservation cluster.signal cluster.signal_delay_s cluster.setup
    cluster.spare_nodes cluster.min_nodes cluster.python
    cluster.container.image cluster.container.engine cluster.container.mounts cluster.container.env
    cluster.env cluster.network_interface cluster.srun_args cluster.sbatch cluster.max_parallel_runs
    cluster.requeue.max_preemptions cluster.requeue.max_time_limits cluster.requeue.max_failures
    cluster.requeue.max_stalled_attempts
    checkpoint.writers
    notify.command notify.timeout_s notify.on
"""
KEYS_OF_A_MESH = (
    "replicate_degree shard_degree tensor_degree pipeline_degree stages_per_rank stages blocks reshard_after_forward "
    "keep_gradients_whole prefetch_blocks cpu_offload"
)
IMPORTS = """
    hpctrain.tasks.Task hpctrain.tasks.Metric hpctrain.tasks.PerSample
    hpctrain.tasks.classification_sums
    hpctrain.tasks.digits.Digits hpctrain.tasks.image_folder.ImageFolder
    hpctrain.tasks.keras_digits.KerasDigits hpctrain.tasks.text.Text hpctrain.tasks.tokens.Tokens
    hpctrain.models.convnet.ConvNet hpctrain.models.gpt.GPT hpctrain.models.keras_module.KerasModule
    hpctrain.models.mlp.MLP hpctrain.models.resnet.ResNet
    hpctrain.callbacks.Callback hpctrain.callbacks.Training
    hpctrain.data.BatchDataset hpctrain.data.TensorBatches hpctrain.data.WeightedOrder hpctrain.data.BucketOrder
    hpctrain.data.TarDataset hpctrain.data.ShardedStream hpctrain.data.ShuffledStream
"""
METHODS_OF_A_TASK = """
    prepare build_model train_dataset eval_dataset loss evaluate derive num_samples to_device order metric metric_mode
    loss_weight collate_fn place log position build_metrics compute_metrics blocks tensor_parallel_plan pipeline_plan
"""
OF_A_TRAINING = """
    task model position log config is_sharded rank world_size device run_dir callback_name metric metric_mode
    takes_part loss_scale parameters eval_samples evaluation_mode weights end
"""
FILES_OF_A_CHECKPOINT = "manifest.json optimizer.pt model.pt state.pt model.safetensors index.json .metadata"
ERRORS = """
    HpctrainError ConfigError ClusterEnvironmentError RunDirectoryError RunDirectoryUnavailableError SupersededError
    SchedulerError SchedulerMissingError RendezvousError DeviceError CheckpointError CheckpointDamagedError
    CheckpointUnlikeError TaskError DivergedError RunFailedError
"""


FROM_PYTHON = """
    compose submit fit Run RunStatus RunState Config CheckpointInfo HpctrainError ConfigError RunFailedError
"""
OF_A_RUN = "path config state status wait metrics checkpoints cancel resume load_task load_model"


def test_names_of_the_package():
    assert set(hpctrain.__all__) == {"__version__", *FROM_PYTHON.split()}
    assert all(getattr(hpctrain, name) for name in hpctrain.__all__)
    # what a type checker reads is what a program gets
    typed = re.findall(r"^    from (\S+) import (\w+) as \2$", Path(hpctrain.__file__).read_text(), re.MULTILINE)
    assert {name: f"hpctrain.{module}" for name, module in hpctrain._MODULES.items()} == {
        name: module for module, name in typed
    }
    assert (Path(hpctrain.__file__).parent / "py.typed").is_file()


def test_what_a_run_has():
    assert {name for name in vars(hpctrain.Run) if not name.startswith("_")} == set(OF_A_RUN.split())


def test_commands():
    assert set(COMMANDS) == set(COMMAND_WORDS.split())


def test_exit_codes():
    codes = {code.name: code.value for code in ExitCode}
    assert codes == {"FINISHED": 0, "FAILED": 1, "BAD_CONFIGURATION": 2, "CANCELLED": 3, "INTERRUPTED": 4}


def test_reasons():
    assert {reason.value for reason in Reason} == set(REASONS.split())


def test_states():
    assert {state.value for state in RunState} == set(STATES.split())


def test_top_level_keys():
    assert {field.name for field in dataclasses.fields(Config)} == set(TOP_LEVEL_KEYS.split())
    assert {field.name for field in dataclasses.fields(ProgramConfig)} == set(KEYS_OF_PROGRAMS.split())


def test_fixed_keys():
    known = flat(Composer().compose(["cluster=slurm"])).keys()
    assert [key for key in FIXED_KEYS.split() if key not in known] == []


def test_keys_of_a_mesh():
    assert set(OF_MESH) == set(KEYS_OF_A_MESH.split()) <= {field.name for field in dataclasses.fields(Parallel)}


@pytest.mark.parametrize("path", IMPORTS.split())
def test_names_that_users_import(path):
    module, _, name = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


def test_what_a_task_may_define():
    from hpctrain.tasks import Task

    assert {name for name in vars(Task) if not name.startswith("_")} == set(METHODS_OF_A_TASK.split())
    assert Task.__abstractmethods__ == {"train_dataset"}


def test_what_a_callback_sees_of_a_training():
    from hpctrain.callbacks import Training

    names = {*Training.__annotations__, *(name for name in vars(Training) if not name.startswith("_"))}
    assert names == set(OF_A_TRAINING.split())


def test_files_of_a_checkpoint():
    assert set(FILES_OF_A_CHECKPOINT.split()) == FILES
    assert is_known_name("__12_0.distcp")
    assert not is_known_name("notes.txt")


def test_errors_and_their_exit_codes():
    found = {name: made for name, made in vars(errors).items() if inspect.isclass(made) and issubclass(made, Exception)}
    assert set(found) == set(ERRORS.split())
    assert {made.exit_code for made in found.values()} <= set(ExitCode)


def test_paths_of_a_run_directory(tmp_path):
    run = RunDirectory(tmp_path)
    paths = [run.config, run.manifest, run.attempts, run.metrics, run.jobs, run.tensorboard, run.logs, run.claims]
    paths += [run.attempt(1), run.checkpoint(100), run.rank_log(3), run.metrics_csv, run.media, run.media_records]
    listed = (
        "config.yaml manifest.json attempts.jsonl metrics.jsonl jobs.jsonl tensorboard logs attempts attempts/0001 "
        "checkpoints/step_00000100 logs/rank_3.log metrics.csv media media.jsonl"
    )
    assert [str(path.relative_to(tmp_path)) for path in paths] == listed.split()


def test_records_of_the_ledger(tmp_path):
    run = RunDirectory(tmp_path)
    run.create(0o700)
    ledger = Ledger(run, clock=lambda: 5.0)
    attempt = ledger.claim()
    ledger.start(attempt, job_id="12", nodes=["n1"], world_size=4, step=0)
    ledger.end(attempt, reason=Reason.COMPLETED, step=140)
    start, end = map(json.loads, run.attempts.read_text().splitlines())
    assert start == {
        "event": "start",
        "attempt": 1,
        "job_id": "12",
        "nodes": ["n1"],
        "world_size": 4,
        "step": 0,
        "time": 5.0,
    }
    assert end == {"event": "end", "attempt": 1, "reason": "completed", "step": 140, "time": 5.0}


def test_what_inspect_prints(tmp_path, capsys):
    assert main([f"run_dir={tmp_path}/run", "trainer.max_steps=1", "logger.tensorboard=false"]) == 0
    capsys.readouterr()
    assert main(["inspect", f"{tmp_path}/run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"step", "samples_seen", "world_size", "weights_digest", "checkpoints"} <= set(report)
    assert (report["step"], report["samples_seen"], report["world_size"]) == (1, 64, 1)
    (checkpoint,) = report["checkpoints"]
    assert {"step", "path", "intact", "bytes"} <= set(checkpoint)
    assert checkpoint["intact"] is True
