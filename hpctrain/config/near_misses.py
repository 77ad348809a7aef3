"""What hpctrain calls that which Lightning, Accelerate, Hydra's launchers and torch name in another way."""

from __future__ import annotations

from collections.abc import Mapping

BATCH = (
    "set trainer.global_batch_size (per step, over all ranks), or trainer.micro_batch_size (per forward pass of a rank)"
)
ACCUMULATION = "set trainer.micro_batch_size: a step accumulates up to trainer.global_batch_size"
PROCESSES = "set cluster.processes_per_node=N, or cluster.gpus_per_node=N"
CLIPPING = "set trainer.clip_grad_norm, or trainer.clip_grad_value"
EVALUATIONS = "set trainer.eval_every_steps=N"
CONTINUE = "python -m hpctrain resume RUN continues a run; init_from=PATH starts a new one with its weights"
CODE_NOW = "a new run copies the code as it is now; for an earlier run: python -m hpctrain resume RUN --code=now"
KEYS: Mapping[str, str] = {
    "True": 'in a file, write "on" with quotes: YAML reads on as true',
    "accelerator": "leave it out: GPUs are used where there are any; on SLURM set cluster.gpus_per_node=N",
    "accumulate_grad_batches": ACCUMULATION,
    "batch_size": BATCH,
    "check_val_every_n_epoch": EVALUATIONS,
    "ckpt_path": CONTINUE,
    "default_root_dir": "set run_dir=PATH",
    "devices": PROCESSES,
    "epochs": "set trainer.max_epochs=N",
    "fast_dev_run": "set trainer.max_steps=2",
    "gpus": "set cluster.gpus_per_node=N",
    "gpus_per_task": "set cluster.gpus_per_process=N",
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clip_val": CLIPPING,
    "learning_rate": "set optimizer.lr",
    "limit_train_batches": "set trainer.max_steps=N",
    "log_every_n_steps": "set logger.every_steps=N",
    "max_grad_norm": CLIPPING,
    "mixed_precision": "choose precision=bf16",
    "monitor": "set checkpoint.metric=NAME",
    "nodes": "set nodes=N",
    "num_epochs": "set trainer.max_epochs=N",
    "num_nodes": "set nodes=N",
    "num_processes": PROCESSES,
    "num_sanity_val_steps": "set trainer.sanity_batches=N",
    "num_train_epochs": "set trainer.max_epochs=N",
    "node": "set nodes=N",
    "output_dir": "set run_dir=PATH",
    "precision": "choose precision=bf16",
    "resume_from_checkpoint": CONTINUE,
    "seed": "set seed=N",
    "strategy": "choose parallel=ddp",
    "tasks_per_node": "set cluster.processes_per_node=N",
    "timeout_min": "set cluster.time_limit_min=N",
    "val_check_interval": EVALUATIONS,
}
"""What to do instead, by the last part of an unknown key."""
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "code": {"none": "set code.snapshot=none", "auto": "set code.snapshot=auto", "now": CODE_NOW},
    "logger": {
        "csv": "set logger.csv=true",
        "mlflow": "set logger.mlflow.enabled=true",
        "tensorboard": "set logger.tensorboard=true",
        "wandb": "set logger.wandb.enabled=true",
    },
    "optimizer": {
        name.lower(): f"{prefer}write optimizer=custom optimizer._target_=torch.optim.{name}"
        for name, prefer in {
            "Adam": "choose optimizer=adamw, or ",
            "Adadelta": "",
            "Adafactor": "",
            "Adagrad": "",
            "Adamax": "",
            "NAdam": "",
            "RAdam": "",
            "RMSprop": "",
        }.items()
    },
    "precision": {
        "16": "choose precision=fp16",
        "16-mixed": "choose precision=fp16",
        "32": "choose precision=fp32",
        "32-true": "choose precision=fp32",
        "bf16-mixed": "choose precision=bf16",
        "bf16-true": "choose precision=bf16_pure",
        "no": "choose precision=fp32",
    },
}
"""What to do instead, by group and the name of an option that it doesn't have."""
OF_ARGUMENTS = ("task", "model", "optimizer", "callbacks")
"""Groups whose keys may be any arguments of a class."""
SINKS = "set logger.wandb.enabled, logger.mlflow.enabled, logger.tensorboard or logger.csv"


def key_instead(key: str) -> str | None:
    """Return what to do instead of setting an unknown key; None if its name isn't one of another library's."""
    group, _, rest = key.partition(".")
    if group in OF_ARGUMENTS and rest:
        return None
    return KEYS.get(key.rpartition(".")[2])


def option_instead(group: str, option: object) -> str | None:
    """Return what to do instead of choosing an unknown option; None if it isn't one of another library's."""
    return OPTIONS.get(group, {}).get(str(option).lower())
