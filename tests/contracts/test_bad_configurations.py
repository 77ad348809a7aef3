"""Every mistake is one line that names the key, exit code 2, and nothing is written."""

import importlib.util
import re
import subprocess
import sys
from importlib import metadata

import pytest

from hpctrain.cli import main
from hpctrain.config import checks
from hpctrain.config.compose import Composer
from hpctrain.config.root import flat
from hpctrain.errors import ConfigError
from hpctrain.phrases import page

ONE_NAMED = ("optimizer=named", "optimizer.named.a={_target_: torch.optim.SGD, lr: 0.1}")
IN_CONTAINER = ("cluster=slurm", "cluster.container.image=/images/torch", "cluster.container.engine=oci")
TWO_RANKS = ("cluster.processes_per_node=2",)
FOUR_RANKS = ("cluster.processes_per_node=4",)
MISTAKES = {
    "unknown key": (["trainer.max_step=3"], "trainer.max_step=3", "did you mean trainer.max_steps"),
    "unknown top-level key": (["foo=bar"], "foo=bar", "--help"),
    "unknown added key": (["+foo=3"], "foo=3", "under task"),
    "unknown group option": (["cluster=foo"], "cluster=foo", "choose one of local, slurm"),
    "unknown schedule": (["schedule=foo"], "schedule=foo", "cosine"),
    "not a number": (["trainer.max_steps=abc"], "trainer.max_steps=abc", "whole number"),
    "not a boolean": (["data.shuffle=maybe"], "data.shuffle=maybe", "true or false"),
    "null where none may be": (["seed=null"], "seed=null", "cannot be null"),
    "zero steps": (["trainer.max_steps=0"], "trainer.max_steps=0", "1 or more"),
    "nothing may be gathered": (["trainer.max_gathered_mb=0"], "trainer.max_gathered_mb=0", "1 or more"),
    "negative learning rate": (["optimizer.lr=-1"], "optimizer.lr=-1", "above 0"),
    "learning rate is no number": (["optimizer.lr=nan"], "optimizer.lr=nan", "above 0"),
    "dropout above one": (["model.dropout=1.5"], "model.dropout=1.5", "[0, 1]"),
    "a trace of one step": (["trainer.profile=[10]"], "trainer.profile=[10]", "write trainer.profile=[10,15]"),
    "a trace that ends early": (["trainer.profile=[15,10]"], "trainer.profile=[15, 10]", "first and the last step"),
    "negative workers": (["data.num_workers=-1"], "data.num_workers=-1", "0 or more"),
    "one checkpoint": (["checkpoint.keep=1"], "checkpoint.keep=1", "2 or more"),
    "an unknown direction": (["checkpoint.metric_mode=up"], "checkpoint.metric_mode=up", "min"),
    "fewer than none": (["checkpoint.keep_best=-1"], "checkpoint.keep_best=-1", "0 or more"),
    "an unknown service": (["logger.comet.enabled=true"], "logger.comet.enabled=true", "logger.csv"),
    "an unknown key of a service": (["logger.wandb.proj=x"], "logger.wandb.proj=x", "logger.wandb.project"),
    "an unknown mode of a service": (["logger.wandb.mode=live"], "logger.wandb.mode=live", "offline, online"),
    "a project with a slash": (["logger.wandb.project=a/b"], "logger.wandb.project='a/b'", "none of /"),
    "a tag that is no text": (["logger.mlflow.tags.a={b: 1}"], "logger.mlflow.tags.a=", "="),
    "a password in an address": (
        ["logger.mlflow.tracking_uri=http://me:secret@host"],
        "logger.mlflow.tracking_uri=***",
        "MLFLOW_TRACKING_PASSWORD",
    ),
    "a token as user": (
        ["logger.mlflow.tracking_uri=http://secret@host"],
        "logger.mlflow.tracking_uri=***",
        "MLFLOW_TRACKING_PASSWORD",
    ),
    "a password with a slash": (
        ["logger.mlflow.tracking_uri=http://me:sec/ret@host"],
        "logger.mlflow.tracking_uri=***",
        "is not an address",
    ),
    "an address that isn't one": (
        ["logger.mlflow.tracking_uri='http://[x'"],
        "logger.mlflow.tracking_uri=http://[x",
        "write it as http://login1:5000",
    ),
    "an empty command": (["notify.command="], "notify.command=''", "omit the key"),
    "a command with braces": (
        ["notify.command='cat \\${HOME}/x'"],
        "notify.command='cat ${HOME}/x'",
        "without braces",
    ),
    "a command that outlasts everything": (["notify.timeout_s=0"], "notify.timeout_s=0", "[1, 600]"),
    "an unknown event": (["notify.on=[started,finished]"], "notify.on=finished", "completed"),
    "a long wait at the end": (["logger.sync_timeout_s=60"], "logger.sync_timeout_s=60", "[0, 10]"),
    "a task without a loss": (
        ["task=custom", "task._target_=hpctrain.tasks.task.Task"],
        "task._target_=hpctrain.tasks.task.Task: has no method loss",
        "define loss(self, model, batch)",
    ),
    "no end": (["trainer.max_epochs=null"], "trainer.max_steps=null", "would never end"),
    "nodes without a cluster": (["nodes=4"], "nodes=4", "add cluster=slurm"),
    "no nodes": (["cluster=slurm", "nodes=0"], "nodes=0", "1 or more"),
    "slurm's key on this machine": (["cluster.partition=gpu"], "cluster.partition=gpu", "add cluster=slurm"),
    "batch that can't be divided": (["cluster=slurm", "nodes=3"], "trainer.global_batch_size=64", "63 or 66"),
    "micro-batch that can't divide": (
        ["trainer.global_batch_size=10", "trainer.micro_batch_size=4"],
        "trainer.global_batch_size=10",
        "8 or 12",
    ),
    "sync batch norm on a CPU": (
        ["cluster=slurm", "trainer.sync_batchnorm=true"],
        "trainer.sync_batchnorm",
        "on GPUs only",
    ),
    "tf32 on a CPU": (["cluster=slurm", "precision=tf32"], "precision.kind=tf32", "precision=fp32"),
    "an unknown precision": (["precision.kind=fp8"], "precision.kind=fp8", "bf16_pure"),
    "a loss scale of nothing": (["precision.initial_loss_scale=0"], "precision.initial_loss_scale=0", "above 0"),
    "data parallel on a CPU": (["parallel=data_parallel"], "parallel.kind=data_parallel", "parallel=ddp"),
    "data parallel in several processes": (
        ["cluster=slurm", "nodes=2", "cluster.gpus_per_node=4", "parallel=data_parallel"],
        "parallel.kind=data_parallel",
        "2 processes are requested",
    ),
    "data parallel, compiled": (
        ["cluster=slurm", "cluster.gpus_per_node=4", "parallel=data_parallel", "trainer.compile=true"],
        "trainer.compile=True",
        "parallel=ddp",
    ),
    "data parallel, recomputed": (
        [
            "task=text",
            "cluster=slurm",
            "cluster.gpus_per_node=4",
            "parallel=data_parallel",
            "trainer.activation_checkpointing=[blocks.*]",
        ],
        "trainer.activation_checkpointing=['blocks.*']: doesn't work with the threads",
        "parallel=ddp",
    ),
    "an unknown compression": (["parallel.gradient_compression=fp8"], "parallel.gradient_compression=fp8", "bf16"),
    "bf16 gradients on a CPU": (
        ["cluster=slurm", "parallel.gradient_compression=bf16"],
        "parallel.gradient_compression=bf16",
        "fp16",
    ),
    "a plus sign for a key that exists": (["+seed=1"], "+seed=1: already has a value", "without the plus sign: seed=1"),
    "a plus sign for a null": (["+seed=null"], "+seed=null: already has a value", "sign: seed=null"),
    "the removal of another value": (["~seed=5"], "~seed=5: is 0 here", "write ~seed to remove it"),
    "a group that isn't one, elsewhere": (["no_group@x=1"], "no_group=1: is placed elsewhere", "leave out @x"),
    "the cluster's kind by hand": (["cluster.kind=slurm"], "cluster.kind=slurm: is set by the option", "cluster=slurm"),
    "the other kind by hand": (["cluster=slurm", "cluster.kind=local"], "cluster.kind=local", "write cluster=local"),
    "a rank by hand": (["cluster.env.RANK=3"], "cluster.env.RANK=3: is set by hpctrain", "each rank has its own"),
    "a variable of SLURM's": (["cluster.env.SLURM_PROCID=0"], "cluster.env.SLURM_PROCID=0", "cluster.srun_args"),
    "a port as a variable": (["cluster.env.MASTER_PORT=1"], "cluster.env.MASTER_PORT=1", "set cluster.master_port"),
    "a variable of variables": (["cluster.env={A: {B: 1}}"], "cluster.env.A={'B': 1}", "write cluster.env.A=VALUE"),
    "a list as a variable": (["cluster.env={A: [1]}"], "cluster.env.A=[1]", "write cluster.env.A=VALUE"),
    "an empty Python": (["cluster=slurm", "cluster.python="], "cluster.python='': is empty", "omit the key"),
    "a Python on two lines": (["cluster=slurm", "cluster.python='/a\nb'"], "cluster.python='/a\\nb'", "on one line"),
    "a Python by a relative path": (
        ["cluster=slurm", "cluster.python=venv/bin/python"],
        "cluster.python=venv/bin/python: is a relative path",
        "/venv/bin/python",
    ),
    "a Python in an unexpanded home": (
        ["cluster=slurm", "cluster.python='~/venv/bin/python'"],
        "cluster.python=~/venv/bin/python: begins with ~",
        "$HOME",
    ),
    "a Python with an option": (
        ["cluster=slurm", "cluster.python='python3 -O'"],
        "cluster.python=python3 -O: is neither an absolute path nor the name of a program",
        "python3",
    ),
    "a folder as Python": (["cluster=slurm", "cluster.python=/opt/venv/"], "is a folder", "/opt/venv/bin/python"),
    "an image without an engine": (
        ["cluster=slurm", "cluster.container.image=/images/torch"],
        "cluster.container.image=/images/torch: needs an engine",
        "oci, pyxis",
    ),
    "an unknown engine": (
        ["cluster=slurm", "cluster.container.image=/images/torch", "cluster.container.engine=docker"],
        "cluster.container.engine=docker: is not known",
        "choose one of apptainer, charliecloud, oci, pyxis",
    ),
    "an engine without an image": (
        ["cluster=slurm", "cluster.container.engine=oci"],
        "cluster.container.engine=oci: has no effect without an image",
        "set cluster.container.image",
    ),
    "a variable of no container": (
        ["cluster=slurm", "cluster.container.env.A=1x"],
        "cluster.container.env={'A': '1x'}: has no effect without an image",
        "set cluster.container.image",
    ),
    "an image by a relative path": (
        ["cluster=slurm", "cluster.container.image=torch.sif", "cluster.container.engine=apptainer"],
        "cluster.container.image=torch.sif: is a relative path",
        "or a URI such as docker://",
    ),
    "a file for Charliecloud by a relative path": (
        ["cluster=slurm", "cluster.container.image=./torch", "cluster.container.engine=charliecloud"],
        "cluster.container.image=./torch: is a relative path",
        "write the absolute path of the image",
    ),
    "a bundle by a relative path": (
        ["cluster=slurm", "cluster.container.image=bundle", "cluster.container.engine=oci"],
        "cluster.container.image=bundle: is a relative path",
        "the folder of a bundle",
    ),
    "an image in an unexpanded home": (
        ["cluster=slurm", "cluster.container.image='~/torch.sif'", "cluster.container.engine=apptainer"],
        "cluster.container.image=~/torch.sif: begins with ~",
        "$HOME",
    ),
    "an option as an image": (
        ["cluster=slurm", "cluster.container.image=--fakeroot", "cluster.container.engine=apptainer"],
        "cluster.container.image=--fakeroot: begins with a dash",
        "name an image",
    ),
    "a relative mount": (
        [*IN_CONTAINER, "cluster.container.mounts=[data]"],
        "cluster.container.mounts=data: is not absolute",
        "write absolute paths",
    ),
    "a mount in a relative place": (
        [*IN_CONTAINER, "cluster.container.mounts=['/data:data']"],
        "cluster.container.mounts=/data:data: is not absolute",
        "write absolute paths",
    ),
    "a mount with an unknown option": (
        [*IN_CONTAINER, "cluster.container.mounts=['/data:/data:rw']"],
        "cluster.container.mounts=/data:/data:rw: is not a mount",
        "HOST:CONTAINER:ro",
    ),
    "a mount of everything": (
        [*IN_CONTAINER, "cluster.container.mounts=['/:/host/..']"],
        "cluster.container.mounts=/:/host/..: can't be mounted",
        "below /",
    ),
    "a mount with a comma": (
        [*IN_CONTAINER, "cluster.container.mounts=['/a,b']"],
        "cluster.container.mounts=/a,b: contains a comma",
        "use another path",
    ),
    "a read-only mount of Charliecloud": (
        [*IN_CONTAINER, "cluster.container.engine=charliecloud", "cluster.container.mounts=['/data:ro']"],
        "cluster.container.mounts=/data:ro: is read-only, which Charliecloud can't do",
        "leave :ro out",
    ),
    "a run whose path a mount can't have": (
        [*IN_CONTAINER, "run_dir='a:b'"],
        "contains ':', at which the engines of containers end a path",
        "use another folder",
    ),
    "a name that is not a variable in a container": (
        [*IN_CONTAINER, "cluster.container.env={A-B: x}"],
        "cluster.container.env.A-B=x: is not a variable name",
        "use letters",
    ),
    "a rank's variable in a container": (
        [*IN_CONTAINER, "cluster.container.env.RANK='0'"],
        "cluster.container.env.RANK=0: is set by hpctrain",
        "each rank has its own",
    ),
    "a container in srun's options as well": (
        [*IN_CONTAINER, "cluster.srun_args=['--container-image=x']"],
        "cluster.srun_args=--container-image=x: starts a container, as cluster.container does",
        "leave it out",
    ),
    "several ranks in SLURM's own containers": (
        [*IN_CONTAINER, "cluster.processes_per_node=2"],
        "cluster.container.engine=oci: starts one process in a container per node",
        "cluster.processes_per_node=1",
    ),
    "a container on this machine": (
        ["cluster.container.image=/a"],
        "cluster.container.image=/a: exists only with cluster=slurm",
        "add cluster=slurm",
    ),
    "a Python for this machine": (["cluster.python=/usr/bin/python3"], "cluster.python=", "add cluster=slurm"),
    "memory below a megabyte": (["cluster=slurm", "cluster.memory_gb=0.0004"], "cluster.memory_gb=0.0004", "[0.001"),
    "memory without end": (["cluster=slurm", "cluster.memory_gb=inf"], "cluster.memory_gb=inf", "in this range"),
    "more CPUs than SLURM can count": (
        ["cluster.cpus_per_process=9999999999"],
        "=9999999999: must be at most 65,535",
        "",
    ),
    "more GPUs than SLURM can count": (
        ["cluster=slurm", "cluster.gpus_per_node=9999999999"],
        "cluster.gpus_per_node=9999999999",
        "65535 or less",
    ),
    "more nodes than SLURM can count": (["cluster=slurm", "nodes=100000"], "nodes=100000: must be at most 65,536", ""),
    "a time limit of centuries": (["cluster=slurm", "cluster.time_limit_min=99999999999"], "5,256,000 minute", ""),
    "an empty partition": (["cluster=slurm", "cluster.partition="], "cluster.partition='': is empty", "omit the key"),
    "one moment": (["optimizer.betas=[0.9]"], "optimizer.betas=[0.9]: must be two numbers", "[0.9,0.999]"),
    "a moment of one": (["optimizer.betas=[0.9,1]"], "optimizer.betas=1.0: must be at least 0 and below 1", ""),
    "a negative epsilon": (["optimizer.eps=-1"], "optimizer.eps=-1.0: must be at least 0", "0 or more"),
    "an infinite decay": (["optimizer.weight_decay=inf"], "optimizer.weight_decay=inf: must be at most", ""),
    "Nesterov without momentum": (
        ["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"],
        "optimizer.nesterov=True",
        "set optimizer.momentum above 0",
    ),
    "steps beyond 64 bits": (
        ["trainer.max_steps=99999999999999999999"],
        "must be at most 9,223,372,036,854,775,807",
        "",
    ),
    "a batch of billions that can't be divided": (
        ["cluster=slurm", "nodes=3", "trainer.global_batch_size=1000000000"],
        "trainer.global_batch_size=1000000000",
        "999999999 or 1000000002",
    ),
    "a million loading processes": (
        ["data.num_workers=1000000"],
        "data.num_workers=1000000: must be at most 1,024",
        "",
    ),
    "a name that is too long": (["name=" + "a" * 300], "is not usable as a folder name", "up to 200 letters"),
    "a folder whose name is too long": (["run_dir=" + "a" * 300], "a name of more than 255 bytes", "shorter"),
    "a path that is too long": (["run_dir=" + "a/" * 2000], "is longer than 3500 bytes", "shorter"),
    "a run inside of a file": (["run_dir=/etc/passwd/run"], "/etc/passwd is not a folder", "another path"),
    "a run in a file system without folders": (["run_dir=/proc/nowhere/run"], "run_dir=/proc/nowhere/run", "/proc"),
    "a percent sign": (["cluster=slurm", "run_dir=50%"], "contains a %, which SLURM replaces", "without it"),
    "a backslash": (["cluster=slurm", r"run_dir='a\b'"], "contains a \\, which SLURM replaces", "without it"),
    "weights that are a text": (["init_from=/etc/passwd"], "init_from=/etc/passwd", "name a run, a checkpoint"),
    "weights that are a folder of others": (["init_from=/etc"], "is neither a run nor a checkpoint", "name a run"),
    "weights that are a device": (["init_from=/dev/null"], "init_from=/dev/null: is not a file", "name a run"),
    "weights with too long a name": (["init_from=" + "a" * 300], "File name too long", "another path"),
    "data with too long a name": (["task=tokens", "task.data=" + "a" * 300], "File name too long", "another path"),
    "an end of documents below zero": (
        ["task=tokens", "task.data=.", "task.packed=true", "task.end_of_text=-1"],
        "task.end_of_text=-1: must be at least 0",
        "",
    ),
    "a folder of groups with too long a name": (["--config-dir", "a" * 300], "File name too long", "another path"),
    "a byte that isn't UTF-8": (["init_match='\udcff'"], r"init_match='\udcff': contains a byte that is not UTF-8", ""),
    "a mode without compiling": (
        ["trainer.compile_mode=max-autotune"],
        "trainer.compile_mode=max-autotune",
        "trainer.compile=true",
    ),
    "cuDNN's choice by timing in a deterministic run": (
        ["trainer.cudnn_benchmark=true", "trainer.deterministic=true"],
        "trainer.cudnn_benchmark=True: chooses algorithms by timing them, which trainer.deterministic=true rules out",
        "set one of the two to false",
    ),
    "CUDA graphs that accumulate": (
        ["trainer.compile=true", "trainer.compile_mode=reduce-overhead", "trainer.micro_batch_size=16"],
        "trainer.compile_mode=reduce-overhead: uses CUDA graphs",
        "set trainer.micro_batch_size=64, a rank's whole share of a step, or trainer.compile_mode=default",
    ),
    "clipping to nothing": (["trainer.clip_grad_value=0"], "trainer.clip_grad_value=0", "above 0"),
    "an optimizer with a closure": (
        ["optimizer=custom", "optimizer._target_=torch.optim.LBFGS"],
        "optimizer._target_=torch.optim.LBFGS",
        "choose another class",
    ),
    "an optimizer without a class": (["optimizer=custom"], "optimizer._target_", "is required"),
    "an unknown scaling": (["optimizer.lr_scaling=cubic"], "optimizer.lr_scaling=cubic", "sqrt"),
    "fused and foreach": (["optimizer.fused=true", "optimizer.foreach=true"], "optimizer.fused=True", "one of them"),
    "a group without a pattern": (
        ["optimizer.groups=[{lr_factor: 0.1}]"],
        "optimizer.groups[0].match=null: must be a pattern",
        'write optimizer.groups[0].match="NAME.*"',
    ),
    "a group that is a text": (["optimizer.groups=[head]"], "optimizer.groups[0]=head: is not a group of keys", ""),
    "an option that groups don't have": (
        ["optimizer.groups=[{match: head.*, lr_factr: 0.1}]"],
        "optimizer.groups[0].lr_factr=0.1: is not an option of a group",
        "did you mean lr_factor?",
    ),
    "another optimizer's option in a group": (
        ["optimizer=custom", "optimizer._target_=torch.optim.RMSprop", "optimizer.groups=[{match: a, nesterov: true}]"],
        "optimizer.groups[0].nesterov=True: is not an option of a group",
        "it takes match, lr_factor",
    ),
    "an option of a group of another kind": (
        ["optimizer.groups=[{match: a, weight_decay: none}]"],
        "optimizer.groups[0].weight_decay=none: must be a number, like 0.01",
        "",
    ),
    "an option of a group out of range": (
        ["optimizer.groups=[{match: a, weight_decay: -1}]"],
        "optimizer.groups[0].weight_decay=-1: must be at least 0",
        "",
    ),
    "a group without a learning rate": (
        ["optimizer.groups=[{match: a, lr_factor: 0}]"],
        "optimizer.groups[0].lr_factor=0: must be a number above 0",
        "or frozen to true",
    ),
    "frozen parameters with an option": (
        ["optimizer.groups=[{match: a, frozen: true, lr_factor: 0.5}]"],
        "optimizer.groups[0].frozen=True: conflicts with lr_factor",
        "remove one of them",
    ),
    "a decay over layers above one": (["optimizer.layer_decay=1.5"], "optimizer.layer_decay=1.5: must be above 0", ""),
    "several optimizers, but none": (["optimizer=named"], "optimizer.named={}: must have an entry per optimizer", ""),
    "a named optimizer without a class": (
        ["optimizer=named", "optimizer.named.a.lr=0.1"],
        "optimizer.named.a._target_=null: must name a class",
        "set optimizer.named.a._target_=module.Class",
    ),
    "a named optimizer with an unknown key": (
        [*ONE_NAMED, "optimizer.named.a.evry_steps=2"],
        "optimizer.named.a.evry_steps=2: torch.optim.SGD has no argument evry_steps",
        "did you mean optimizer.named.a.every_steps?",
    ),
    "groups next to named optimizers": (
        [*ONE_NAMED, "+optimizer.groups=[{match: nothing}]"],
        "optimizer.groups=[{'match': 'nothing'}]: would be ignored: named optimizers share only lr, weight_decay",
        "set optimizer.named.NAME.groups",
    ),
    "a typo next to named optimizers": (
        [*ONE_NAMED, "+optimizer.clip_grad_nrm=1"],
        "optimizer.clip_grad_nrm=1: would be ignored",
        "set optimizer.named.NAME.clip_grad_nrm",
    ),
    "a named optimizer next to a class": (
        ["optimizer=adamw", "+optimizer.named.a={_target_: torch.optim.SGD}"],
        "optimizer.named={a}: would be ignored next to optimizer._target_=torch.optim.AdamW",
        "use optimizer=named",
    ),
    "a negative rate that named optimizers share": (
        [*ONE_NAMED, "optimizer.lr=-1"],
        "optimizer.lr=-1.0: must be a number above 0; set optimizer.lr to one",
        "",
    ),
    "a bound of a named optimizer without end": (
        [*ONE_NAMED, "optimizer.named.a.clip_grad_norm=" + "9" * 400],
        "optimizer.named.a.clip_grad_norm=999",
        "is too large",
    ),
    "a decay of a named optimizer without end": (
        [*ONE_NAMED, "optimizer.named.a.weight_decay=" + "9" * 400],
        "optimizer.named.a.weight_decay=",
        "is too large",
    ),
    "a bound of a named optimizer": (
        [*ONE_NAMED, "optimizer.named.a.clip_grad_norm=0"],
        "optimizer.named.a.clip_grad_norm=0.0: must be a number above 0; set optimizer.named.a.clip_grad_norm to one",
        "",
    ),
    "a negative decay of a named optimizer's group": (
        [*ONE_NAMED, "optimizer.named.a.groups=[{match: a, weight_decay: -1}]"],
        "optimizer.named.a.groups[0].weight_decay=-1: must be at least 0",
        "",
    ),
    "a decay of a group that is a text": (
        ["optimizer=custom", "optimizer._target_=torch.optim.Adam", "optimizer.groups=[{match: a, weight_decay: abc}]"],
        "optimizer.groups[0].weight_decay=abc: must be a number; correct it",
        "",
    ),
    "a decay of a group that is null": (
        [
            "optimizer=custom",
            "optimizer._target_=torch.optim.Adam",
            "optimizer.groups=[{match: a, weight_decay: null}]",
        ],
        "optimizer.groups[0].weight_decay=null: must be a number",
        "",
    ),
    "a moment of any class": (
        ["optimizer=custom", "optimizer._target_=torch.optim.Adam", "+optimizer.betas=[1.9,0.9]"],
        "optimizer.betas=1.9: must be at least 0 and below 1",
        "",
    ),
    "one moment of any class": (
        ["optimizer=custom", "optimizer._target_=torch.optim.Adam", "+optimizer.betas=3"],
        "optimizer.betas=3: must be a list of numbers",
        "write optimizer.betas=[0.9,0.999]",
    ),
    "an optimizer with a closure, by its module": (
        ["optimizer=custom", "optimizer._target_=torch.optim.lbfgs.LBFGS"],
        "optimizer._target_=torch.optim.lbfgs.LBFGS",
        "choose another class",
    ),
    "a method that computes no loss": (
        [*ONE_NAMED, "optimizer.named.a.loss=build_model"],
        "optimizer.named.a.loss=build_model: has another purpose",
        "name a method that computes a loss",
    ),
    "half a step of warm-up": (
        [*ONE_NAMED, "optimizer.named.a.schedule={warmup_steps: 1.5}"],
        "optimizer.named.a.schedule.warmup_steps=1.5: must be a whole number",
        f"see {page('reference/configuration.md')}",
    ),
    "a factor of a named optimizer's schedule": (
        [*ONE_NAMED, "optimizer.named.a.schedule={kind: plateau, factor: 2}"],
        "optimizer.named.a.schedule.factor=2.0: must be",
        "set optimizer.named.a.schedule.factor to such a number",
    ),
    "a named optimizer's schedule with two warm-ups": (
        [*ONE_NAMED, "optimizer.named.a.schedule={warmup_steps: 1, warmup_epochs: 1}"],
        "optimizer.named.a.schedule.warmup_epochs=1.0: conflicts with optimizer.named.a.schedule.warmup_steps=1",
        "",
    ),
    "a named optimizer that never steps": (
        [*ONE_NAMED, "optimizer.named.a.every_steps=0"],
        "optimizer.named.a.every_steps=0: must be at least 1",
        "",
    ),
    "steps that are a text": (
        [*ONE_NAMED, "optimizer.named.a.every_steps=often"],
        "optimizer.named.a.every_steps='often': must be a whole number; see",
        "",
    ),
    "no optimizer in every step": (
        [*ONE_NAMED, "optimizer.named.a.every_steps=2"],
        "optimizer.named.a.every_steps=2: no optimizer takes part in every step",
        "set one of them to 1",
    ),
    "two optimizers for the rest": (
        [*ONE_NAMED, "optimizer.named.b={_target_: torch.optim.SGD}"],
        "optimizer.named.b.match=null: takes all parameters that no other optimizer matches",
        "set it for one of them",
    ),
    "an exclusion from nothing": (
        [*ONE_NAMED, "optimizer.named.a.exclude=head.*"],
        "optimizer.named.a.exclude=head.*: narrows match, which isn't set",
        'add optimizer.named.a.match="*"',
    ),
    "a loss that the task doesn't have": (
        [*ONE_NAMED, "optimizer.named.a.loss=los"],
        "optimizer.named.a.loss=los: hpctrain.tasks.digits.Digits has no such method",
        "did you mean loss?",
    ),
    "one loss at two paces": (
        [*ONE_NAMED, "optimizer.named.b={_target_: torch.optim.SGD, match: a.*, every_steps: 2}"],
        "optimizer.named.b.every_steps=2: differs from optimizer.named.a.every_steps=1",
        "make them equal",
    ),
    "a named optimizer's schedule that is none": (
        [*ONE_NAMED, "optimizer.named.a.schedule={kind: sine}"],
        "optimizer.named.a.schedule.kind=sine: is not known",
        "cosine",
    ),
    "degrees of more ranks than there are": (
        [*TWO_RANKS, "parallel=mesh", "parallel.replicate_degree=2", "parallel.shard_degree=4"],
        "parallel.shard_degree=4: with parallel.replicate_degree=2 needs 8 ranks, but there are 2",
        "set one of the two to -1",
    ),
    "replicas that the ranks can't be divided among": (
        [*TWO_RANKS, "parallel=fsdp", "parallel.replicate_degree=3"],
        "parallel.replicate_degree=3: doesn't divide 2 ranks",
        "use one of 1, 2",
    ),
    "shards that the ranks can't be divided among": (
        [*TWO_RANKS, "parallel=hsdp", "parallel.shard_degree=3"],
        "parallel.shard_degree=3: doesn't divide 2 ranks",
        "use one of 1, 2",
    ),
    "two open degrees": (
        ["parallel=fsdp", "parallel.replicate_degree=-1"],
        "parallel.shard_degree=-1: only one degree may be -1",
        "set parallel.replicate_degree=1, or this one to a number of ranks",
    ),
    "no replicas": (
        ["parallel=fsdp", "parallel.replicate_degree=0"],
        "parallel.replicate_degree=0",
        "1 or more, or -1",
    ),
    "no ranks of a replica": (["parallel=fsdp", "parallel.shard_degree=-2"], "parallel.shard_degree=-2", "or -1"),
    "a key of a mesh without one": (
        ["parallel.blocks=[blocks.*]"],
        "parallel.blocks=['blocks.*']: has no effect with parallel=ddp",
        "use parallel=mesh",
    ),
    "a key of DDP with a mesh": (
        ["parallel=fsdp", "parallel.bucket_cap_mb=50"],
        "parallel.bucket_cap_mb=50: has no effect with parallel=mesh",
        "use parallel=ddp",
    ),
    "a tensor degree that doesn't divide the ranks of a node": (
        ["cluster=slurm", "nodes=3", "cluster.gpus_per_node=2", "parallel=tp"],
        "parallel.tensor_degree=6: doesn't divide the 2 ranks of a node",
        "use one of 1, 2",
    ),
    "a tensor degree that doesn't divide the heads": (
        [*FOUR_RANKS, "parallel=tp", "model=gpt", "model.num_heads=2", "task=text"],
        "parallel.tensor_degree=4: doesn't divide model.num_heads=2",
        "use one of 1, 2",
    ),
    "degrees that leave no whole number": (
        [*FOUR_RANKS, "parallel=fsdp", "parallel.replicate_degree=4", "parallel.tensor_degree=2"],
        "parallel.replicate_degree=4: with parallel.tensor_degree=2 needs 8 ranks or a multiple, but there are 4",
        "change one of them",
    ),
    "three degrees of more ranks than there are": (
        [*FOUR_RANKS, "parallel=mesh", "parallel.shard_degree=2", "parallel.tensor_degree=4"],
        "parallel.shard_degree=2: with parallel.replicate_degree=1 and parallel.tensor_degree=4 needs 8 ranks",
        "set one of them to -1",
    ),
    "an open tensor degree and another": (
        ["parallel=fsdp", "parallel.tensor_degree=-1"],
        "parallel.tensor_degree=-1: only one degree may be -1",
        "set parallel.shard_degree=1",
    ),
    "a tensor degree and a model without a plan": (
        [*TWO_RANKS, "parallel=tp", "task=digits", "model=mlp"],
        "parallel.tensor_degree=2: neither MLP nor Digits has a plan",
        "define tensor_parallel_plan in one of them",
    ),
    "a tensor degree without a mesh": (
        ["parallel.tensor_degree=2"],
        "parallel.tensor_degree=2: has no effect with parallel=ddp",
        "use parallel=mesh",
    ),
    "an open pipeline degree and another": (
        ["parallel=pp", "parallel.shard_degree=-1"],
        "parallel.pipeline_degree=-1: only one degree may be -1",
        "set parallel.shard_degree=1",
    ),
    "a pipeline of no ranks": (["parallel=pp", "parallel.pipeline_degree=0"], "parallel.pipeline_degree=0", "or -1"),
    "a pipeline without a mesh": (
        ["parallel.pipeline_degree=2"],
        "parallel.pipeline_degree=2: has no effect with parallel=ddp",
        "use parallel=mesh",
    ),
    "a pipeline that the ranks can't be divided among": (
        [*FOUR_RANKS, "parallel=fsdp", "parallel.pipeline_degree=3"],
        "parallel.pipeline_degree=3: doesn't divide 4 ranks",
        "use one of 1, 2, 4",
    ),
    "a pipeline and a model without a plan": (
        [*TWO_RANKS, "parallel=pp", "task=digits", "model._target_=torch.nn.Linear"],
        "parallel.pipeline_degree=2: Linear isn't an nn.Sequential, and neither it nor Digits has a plan",
        "define pipeline_plan in one of them",
    ),
    "no stage of a rank": (["parallel=pp", "parallel.stages_per_rank=0"], "parallel.stages_per_rank=0", "1 or more"),
    "stages per rank without a pipeline": (
        [*TWO_RANKS, "parallel=fsdp", "parallel.stages_per_rank=2"],
        "parallel.stages_per_rank=2: has no effect with parallel.pipeline_degree=1",
        "use parallel=pp with several ranks",
    ),
    "stages without a pipeline": (
        ["parallel=pp", "parallel.stages=[blocks.1]"],
        "parallel.stages=['blocks.1']: has no effect with parallel.pipeline_degree=1",
        "use parallel=pp with several ranks",
    ),
    "fewer stages than the ranks have": (
        [*TWO_RANKS, "parallel=pp", "parallel.stages_per_rank=2", "parallel.stages=[blocks.2]"],
        "parallel.stages=['blocks.2']: begins 2 stages, and parallel.pipeline_degree=2 with parallel.stages_per_rank=2",
        "name the 3 modules with which the second stage and each further one begins",
    ),
    "CUDA graphs of a pipeline": (
        [*TWO_RANKS, "parallel=pp", "trainer.compile=true", "trainer.compile_mode=max-autotune"],
        "trainer.compile_mode=max-autotune: uses CUDA graphs, in which the weights",
        "set it to default",
    ),
    "Muon with parts of matrices": (
        [*TWO_RANKS, "parallel=tp", "optimizer=muon", "task=text"],
        "optimizer.named.muon._target_=torch.optim.Muon: needs whole matrices",
        "parallel=fsdp",
    ),
    "a batch that groups of ranks can't be divided among": (
        [*FOUR_RANKS, "task=text", "parallel=fsdp_tp", "parallel.tensor_degree=2", "trainer.global_batch_size=7"],
        "trainer.global_batch_size=7: cannot be divided among 2 groups of 2 ranks that share samples",
        "set it to 6 or 8",
    ),
    "fewer than no blocks ahead": (
        ["parallel=fsdp", "parallel.prefetch_blocks=-1"],
        "parallel.prefetch_blocks=-1",
        "0 or more",
    ),
    "shards in host memory without a GPU": (
        ["cluster=slurm", "nodes=2", "parallel=fsdp", "parallel.cpu_offload=true"],
        "parallel.cpu_offload=True: keeps in host memory what would be on a GPU",
        "set cluster.gpus_per_node, or leave it out",
    ),
    "shards of one rank in host memory": (
        ["cluster=slurm", "cluster.gpus_per_node=1", "parallel=fsdp", "parallel.cpu_offload=true"],
        "parallel.cpu_offload=True: has no effect with 1 rank",
        "use 2 ranks or more",
    ),
    "shards in host memory without a mesh": (
        ["parallel.cpu_offload=true"],
        "parallel.cpu_offload=True: has no effect with parallel=ddp",
        "use parallel=mesh",
    ),
    "no file of a checkpoint": (["parallel=fsdp", "checkpoint.writers=0"], "checkpoint.writers=0", "1 or more"),
    "master weights of a sharded model": (
        [*TWO_RANKS, "parallel=fsdp", "precision=fp16_master"],
        "precision.kind=fp16_master: keeps a half copy",
        "use precision=fp16",
    ),
    "channels last in a sharded model": (
        [*TWO_RANKS, "parallel=fsdp", "trainer.channels_last=true"],
        "trainer.channels_last=True: reorders weights",
        "set it to false",
    ),
    "CUDA graphs of a sharded model": (
        [*TWO_RANKS, "parallel=fsdp", "trainer.compile=true", "trainer.compile_mode=max-autotune"],
        "trainer.compile_mode=max-autotune: uses CUDA graphs",
        "set it to default",
    ),
    "several GPUs per rank of a mesh": (
        [*TWO_RANKS, "parallel=fsdp", "cluster.gpus_per_process=2"],
        "cluster.gpus_per_process=2: spreads a model over the GPUs of a process",
        "set it to 1",
    ),
    "writers of one rank": (
        ["checkpoint.writers=2"],
        "checkpoint.writers=2: has no effect",
        "leave it out, or use parallel=mesh",
    ),
    "safetensors of a sharded model": (
        [*TWO_RANKS, "parallel=fsdp", "checkpoint.safetensors=true"],
        "checkpoint.safetensors=True: needs the whole model in one process",
        "`python -m hpctrain export RUN`",
    ),
    "weights of other stages": (
        [*TWO_RANKS, "parallel=pp", "callbacks=[log_weights]"],
        "callbacks.log_weights=...: logs weights on rank zero, which has only the last stage",
        "leave it out",
    ),
    "averages of a sharded model": (
        [*TWO_RANKS, "parallel=fsdp", "callbacks=[average_weights]"],
        "callbacks.average_weights=...: averages whole weights on one rank",
        "use trainer.ema_decay",
    ),
    "unfreezing a sharded model by steps": (
        [*TWO_RANKS, "parallel=fsdp", "optimizer.groups=[{match: a.*, unfreeze_at_step: 3}]"],
        "optimizer.groups[0].unfreeze_at_step=3: doesn't work with parallel=mesh",
        "or use parallel=ddp",
    ),
    "unfreezing a sharded model by epochs": (
        [*TWO_RANKS, "parallel=fsdp", "optimizer.groups=[{match: a.*, unfreeze_at_epoch: 1}]"],
        "optimizer.groups[0].unfreeze_at_epoch=1: doesn't work with parallel=mesh",
        "or use parallel=ddp",
    ),
    "several losses in pure bf16": (
        [
            *ONE_NAMED,
            "optimizer.named.b={_target_: torch.optim.SGD, match: a.*, loss: evaluate}",
            "precision=bf16_pure",
        ],
        "precision.kind=bf16_pure: works on calls of the whole model",
        "use precision=bf16",
    ),
    "several losses, compiled to CUDA graphs": (
        [
            *ONE_NAMED,
            "optimizer.named.b={_target_: torch.optim.SGD, match: a.*, loss: evaluate}",
            "trainer.compile=true",
            "trainer.compile_mode=reduce-overhead",
        ],
        "trainer.compile_mode=reduce-overhead: doesn't work with several losses: it uses CUDA graphs",
        "set it to default",
    ),
    "unfreezing what is compiled": (
        ["optimizer.groups=[{match: a.*, unfreeze_at_step: 3}]", "trainer.compile=true"],
        "optimizer.groups[0].unfreeze_at_step=3: doesn't work with trainer.compile=true",
        "set one of them",
    ),
    "a warm-up in steps and epochs": (
        ["schedule.warmup_steps=5", "schedule.warmup_epochs=1"],
        "schedule.warmup_epochs=1.0",
        "one of them",
    ),
    "a callback that doesn't exist": (
        ["callbacks=[early_stoping]"],
        "callbacks=early_stoping",
        "did you mean early_stopping?",
    ),
    "several callbacks without brackets": (
        ["callbacks=early_stopping,log_weights"],
        "callbacks=early_stopping,log_weights",
        "write callbacks=[early_stopping,log_weights] to choose them all",
    ),
    "callbacks that are null": (["callbacks=null"], "callbacks=null", "write callbacks=[] for none"),
    "callbacks that are a number": (["callbacks=3"], "callbacks=3", "callbacks=[NAME,NAME]"),
    "a key of a callback that isn't chosen": (
        ["callbacks.early_stopping.patience=1"],
        "callbacks.early_stopping.patience=1",
        "add callbacks=[early_stopping]",
    ),
    "a misspelt key of a callback": (
        ["callbacks=early_stopping", "callbacks.early_stopping.patienc=1"],
        "callbacks.early_stopping.patienc=1",
        "did you mean callbacks.early_stopping.patience?",
    ),
    "a callback's value": (
        ["callbacks=[early_stopping]", "callbacks.early_stopping.patience=-1"],
        "callbacks.early_stopping.patience=-1",
        "1 or more",
    ),
    "a value of a callback under a name of one's own": (
        ["+callbacks.mine._target_=hpctrain.callbacks.early_stopping.EarlyStopping", "+callbacks.mine.mode=minimum"],
        "callbacks.mine.mode=minimum: is not known",
        "choose one of max, min",
    ),
    "a number of a callback under a name of one's own": (
        ["+callbacks.mine._target_=hpctrain.callbacks.early_stopping.EarlyStopping", "+callbacks.mine.patience=0"],
        "callbacks.mine.patience=0",
        "1 or more",
    ),
    "a text where a callback takes a number": (
        ["+callbacks.mine._target_=hpctrain.callbacks.log_text.LogText", "+callbacks.mine.new_tokens='3'"],
        "callbacks.mine.new_tokens='3': must be a whole number; see",
        "docs/reference/configuration.md",
    ),
    "a value of a model of one's own file": (
        ["model=own", "model._target_=hpctrain.models.mlp.MLP", "+model.dropout=2"],
        "model.dropout=2",
        "in this range",
    ),
    "a callback without a class": (["+callbacks.mine=3"], "callbacks.mine=3", "is not a callback"),
    "a callback of another kind": (
        ["+callbacks.mine._target_=hpctrain.tasks.digits.Digits"],
        "callbacks.mine._target_=hpctrain.tasks.digits.Digits",
        "derive the class from it",
    ),
    "no time to train": (["trainer.max_time_min=0"], "trainer.max_time_min=0", "above 0"),
    "no step to pause at": (["trainer.pause_at_step=0"], "trainer.pause_at_step=0", "at least 1"),
    "a schedule without its class": (["schedule=custom"], "schedule._target_=???", "is required"),
    "a schedule that doesn't exist": (
        ["schedule=custom", "schedule._target_=torch.optim.lr_scheduler.SteppLR"],
        "schedule._target_=torch.optim.lr_scheduler.SteppLR",
        "did you mean torch.optim.lr_scheduler.StepLR?",
    ),
    "a schedule without its argument": (
        ["schedule=custom", "schedule._target_=torch.optim.lr_scheduler.StepLR"],
        "needs the argument step_size",
        "+schedule.step_size=VALUE",
    ),
    "torch's plateau": (
        ["schedule=custom", "schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"],
        "needs the metric of an evaluation",
        "use schedule=plateau",
    ),
    "a plateau's key without it": (["schedule.patience=3"], "schedule.patience=3", "add schedule=plateau"),
    "a plateau that raises the rate": (["schedule=plateau", "schedule.factor=2"], "schedule.factor=2", "below 1"),
    "steps without a place": (["schedule=step"], "schedule.drop_at_epochs", "[30,60,80]"),
    "nccl on a CPU": (["cluster=slurm", "parallel.backend=nccl"], "parallel.backend=nccl", "gloo"),
    "more GPUs than are here": (
        ["cluster.gpus_per_node=64"],
        "cluster.gpus_per_node=64",
        "cluster.processes_per_node=64",
    ),
    "GPUs that can't be shared": (
        ["cluster=slurm", "cluster.gpus_per_node=3", "cluster.gpus_per_process=2"],
        "cluster.gpus_per_process=2",
        "divisor",
    ),
    "two ranks for each GPU": (
        ["cluster=slurm", "cluster.gpus_per_node=2", "cluster.processes_per_node=4", "cluster.gpus_per_process=1"],
        "cluster.processes_per_node=4",
        "set it to 2, or add parallel.backend=gloo",
    ),
    "a task without a class": (["task=custom"], "task._target_", "is required"),
    "a class that is no path": (["task=custom", "task._target_=Mine"], "task._target_=Mine", "module.Class"),
    "a module that isn't there": (
        ["task=custom", "task._target_=nowhere.Mine"],
        "task._target_=nowhere.Mine",
        "install",
    ),
    "a class that isn't there": (
        ["task=custom", "task._target_=hpctrain.tasks.digits.Digit"],
        "task._target_=hpctrain.tasks.digits.Digit",
        "did you mean hpctrain.tasks.digits.Digits?",
    ),
    "an argument that is missing": (
        ["cluster=slurm", "cluster.dry_run=true", "task=custom", "task._target_=hpctrain.tasks.tokens.Tokens"],
        "needs the argument data",
        "add +task.data=VALUE",
    ),
    "an argument that isn't there": (["+task.held_ot=0.5"], "task.held_ot=0.5", "did you mean task.held_out?"),
    "fewer than no spare nodes": (["cluster=slurm", "cluster.spare_nodes=-1"], "cluster.spare_nodes=-1", "0"),
    "more nodes at least than at all": (
        ["cluster=slurm", "nodes=2", "cluster.min_nodes=3"],
        "cluster.min_nodes=3",
        "is more than nodes=2; lower it, or raise nodes",
    ),
    "fewer nodes that don't divide the batch": (
        ["cluster=slurm", "nodes=4", "cluster.min_nodes=3"],
        "cluster.min_nodes=3",
        "cannot be divided among 3 ranks; lower it, change trainer.global_batch_size, or leave cluster.min_nodes out",
    ),
    "at least no node": (["cluster=slurm", "cluster.min_nodes=0"], "cluster.min_nodes=0", "at least 1"),
    "sbatch key with its own key": (["cluster=slurm", "cluster.sbatch.nodes=3"], "cluster.sbatch.nodes=3", "set nodes"),
    "GPUs of two keys": (
        ["cluster=slurm", "cluster.gpus_per_node=4", "cluster.sbatch.gres='gpu:a100:4,nvme:1'"],
        "cluster.sbatch.gres=gpu:a100:4,nvme:1",
        "requests GPUs, and cluster.gpus_per_node=4 is set, too; to keep the gres, set cluster.gpus_per_node=null",
    ),
    "GPUs in the gres that can't be counted": (
        ["cluster=slurm", "cluster.sbatch.gres='gpu:a100:'"],
        "cluster.sbatch.gres=gpu:a100:",
        "expected GPUs such as gpu:4 or gpu:a100:4, found gpu:a100:",
    ),
    "GPUs as a node prints them": (
        ["cluster=slurm", "cluster.sbatch.gres='gpu:a100:4(S:0-1)'"],
        "cluster.sbatch.gres=gpu:a100:4(S:0-1)",
        "is how scontrol prints a node's GPUs",
    ),
    "submitit's gres": (["cluster=slurm", "cluster.gres=gpu:4"], "cluster.gres=gpu:4", "or cluster.sbatch.gres"),
    "a type without its group": (["gpu_type=a100"], "gpu_type=a100", "set cluster.gpu_type=NAME"),
    "GPUs of a step": (
        ["cluster=slurm", "cluster.sbatch.tres-per-task=gres/gpu:1"],
        "cluster.sbatch.tres-per-task=gres/gpu:1",
        "set cluster.gpus_per_node=N, and where needed cluster.gpu_type=a100",
    ),
    "a type of no GPUs": (["cluster=slurm", "cluster.gpu_type=a100"], "cluster.gpu_type=a100", "gpus_per_node=N"),
    "a type with a number": (
        ["cluster=slurm", "cluster.gpus_per_node=4", "cluster.gpu_type='a100:4'"],
        "cluster.gpu_type=a100:4",
        "is not the name of a type",
    ),
    "a form of request that there isn't": (
        ["cluster=slurm", "cluster.gpus_per_node=4", "cluster.gpu_request=gpus"],
        "cluster.gpu_request=gpus",
        "choose one of gpus_per_node, gpus_per_task_type, gres",
    ),
    "GPUs that tasks can't share": (
        [
            *("cluster=slurm", "cluster.gpus_per_node=4", "cluster.gpu_request=gpus_per_task_type"),
            *("cluster.processes_per_node=3", "trainer.global_batch_size=30"),
        ],
        "cluster.gpu_request=gpus_per_task_type",
        "can't divide the 4 GPUs of a node among 3 tasks; choose gpus_per_node or gres",
    ),
    "GPUs per task of an unknown number of tasks": (
        [
            *("cluster=slurm", "nodes=2", "cluster.min_nodes=1"),
            *("cluster.gpus_per_node=2", "cluster.gpu_request=gpus_per_task_type"),
        ],
        "cluster.gpu_request=gpus_per_task_type",
        "choose gpus_per_node or gres, or set cluster.min_nodes=null",
    ),
    "GPUs of the job": (["cluster=slurm", "cluster.sbatch.gpus=4"], "cluster.sbatch.gpus=4", "cluster.gpus_per_node=N"),
    "GPUs of a task": (
        ["cluster=slurm", "cluster.gpus_per_node=4", "cluster.sbatch.gpus-per-task=1"],
        "cluster.sbatch.gpus-per-task=1",
        "set cluster.gpus_per_node=N",
    ),
    "sbatch key that is none": (["cluster=slurm", "cluster.sbatch={a b: 1}"], "cluster.sbatch.a b=1", "long name"),
    "a new line in a value": (["cluster=slurm", "cluster.account='a\nb'"], "cluster.account", "one line"),
    "signal after the end": (["cluster=slurm", "cluster.time_limit_min=1"], "cluster.signal_delay_s=90", "shorten"),
    "unknown signal": (["cluster=slurm", "cluster.signal=KILL"], "cluster.signal=KILL", "USR2"),
    "bad variable name": (["cluster.env={A-B: x}"], "cluster.env.A-B", "letters"),
    "a name with a space": (["name='a b'"], "name='a b'", "letters"),
    "a run before it that isn't there": (["after=nowhere"], "after=nowhere: is not a run", "after=[] waits for none"),
    "a run before it without a name": (["after=[a,'']"], "after", "contains an empty name"),
    "what a failed run before it means": (["after_failure=skip"], "after_failure=skip", "end, start, wait"),
    "permissions that lock out": (["run_mode=0077"], "run_mode=0077", "0750"),
    "permissions for everybody": (["run_mode=0777"], "run_mode=0777", "0750"),
    "heads that don't divide": (["task=text", "model.width=65"], "model.width=65", "num_heads"),
    "context longer than the model's": (["task=text", "task.context_length=999"], "task.context_length=999", "raise"),
    "weights that are not there": (["init_from=nowhere"], "init_from=nowhere", "name a run"),
    "weights without a name": (["init_from="], "init_from=: is empty", "name a run"),
    "a moving average above one": (["trainer.ema_decay=1.5"], "trainer.ema_decay=1.5", "set trainer.ema_decay"),
    "data that must be given": (["task=image_folder"], "task.data=???", "add task.data=VALUE"),
    "an optimizer without what the task's file sets": (
        ["task=tokens", "task.data=.", "optimizer=sgd"],
        "task=tokens: contains optimizer.betas, which optimizer=sgd doesn't have",
        "leave out optimizer=sgd, or copy the file to conf/task/NAME.yaml without optimizer.betas",
    ),
    "data that are not there": (["task=tokens", "task.data=nowhere"], "task.data=nowhere", "set it to the folder"),
    "a depth that is none": (["task=image_folder", "task.data=.", "model.depth=42"], "model.depth=42", "18, 34, 50"),
    "two numbers for three channels": (
        ["task=image_folder", "task.data=.", "task.mean=[1,2]"],
        "task.mean=[1.0, 2.0]",
        "write three numbers",
    ),
    "half a place to meet": (["parallel.init_method=tcp://n1"], "parallel.init_method=tcp://n1", "tcp://HOST:PORT"),
    "a port that is none": (["parallel.init_method=tcp://n1:x"], "parallel.init_method=tcp://n1:x", "tcp://HOST:PORT"),
    "no place to meet": (["parallel.init_method=http://x"], "parallel.init_method=http://x", "tcp://"),
    "not KEY=VALUE": (["trainer.max_steps=3", "a b"], "a b", "KEY=VALUE"),
    "several values without -m": (["nodes=1,2"], "nodes=1,2", "add -m"),
    "several names without -m": (["name=a,b"], "name=a,b", "add -m to sweep over them, or write name='\"a,b\"'"),
    "several folders": (["run_dir=x,y"], "run_dir=x,y: has several values; write run_dir=", "for a string"),
    "several options without -m": (
        ["task=digits,text"],
        "task=digits,text",
        "add -m to sweep over them, or choose one option",
    ),
    "an option that is no name": (["optimizer=???"], "optimizer=???: is not an option of the group optimizer", "adamw"),
    "a reference as an option": (["callbacks=${seed}"], "is not an option of the group callbacks", "callbacks=[]"),
    "several clusters": (["cluster=local,slurm"], "cluster=local,slurm: has several values", "; choose one option"),
    "several variables without -m": (["cluster.env.A=a,b"], "cluster.env.A=a,b", "add -m"),
    "several new keys without -m": (["+task.width=1,2"], "task.width=1,2", "add -m"),
    "numbers without brackets": (["optimizer.betas=0.9,0.99"], "0.9,0.99", "optimizer.betas=[0.9,0.99] for a list"),
    "a range without -m": (["seed=range(1,3)"], "seed=range(1,3): has several values; add -m", ""),
    "accounts without -m": (["cluster=slurm", "cluster.account=a,b"], "cluster.account=a,b", "add -m"),
    "an interpolation to nowhere": (["name=${nobody}"], "nobody", "does not exist"),
    "no such folder": (["--config-dir", "nowhere"], "--config-dir=nowhere", "folder"),
    "another main configuration": (
        ["-cn", "mine", "cluster=slurm"],
        "--config-name=mine",
        "conf/experiment/NAME.yaml, and add experiment=NAME",
    ),
    "another main configuration of a sweep": (
        ["--config-name=mine", "-m", "cluster=slurm", "seed=1,2"],
        "--config-name=mine",
        "experiment=NAME",
    ),
    "another main configuration, shown": (["-cn", "mine", "--cfg", "job"], "--config-name=mine", "experiment=NAME"),
    "another folder than ours": (["-cp", "conf", "cluster=slurm"], "--config-path=conf", "experiment=NAME"),
    "a pickle of Hydra's": (["--experimental-rerun", "config.pickle"], "--experimental-rerun=config.pickle", "resume"),
    "a number that is required": (["trainer.max_steps=???"], "trainer.max_steps=???: is required", "=VALUE"),
    "a list for a text": (
        ["checkpoint.metric=[1]"],
        "checkpoint.metric=[1]: must be a single value",
        "docs/reference/configuration.md",
    ),
    # OmegaConf 2.3 and 2.4 differ: one tells the value, and the other the type
    "a reference of another type": (["optimizer.betas=${seed}"], "optimizer.betas=", ""),
    "variables of another type": (["cluster.env=${seed}"], "cluster.env=", "has the wrong type; see"),
    "a list in a list": (["schedule.drop_at_steps=[[1]]"], "schedule.drop_at_steps=[[1]]: has the wrong type", ""),
    "a value that refers to itself": (["seed=${seed}"], "seed=${seed}: refers to itself", "write a value"),
    "a value without end": (["name=" + "a" * 5000], "a...: is not usable as a folder name", "letters"),
    "an unknown command": (["fly"], "fly", "the commands are"),
    "sweeping the cluster": (["-m", "cluster=local,slurm"], "cluster=local,slurm", "can't be swept"),
    "sweeping run_dir": (["-m", "run_dir=a,b"], "run_dir=a,b", "RUN_DIR/0"),
    "a sweep over the parts of a gres": (
        ["-m", "cluster=slurm", "cluster.sbatch.gres=gpu:a100:4,nvme:1"],
        "cluster.sbatch.gres=gpu:a100:4,nvme:1: is several values with -m, of which some have no GPUs",
        "write \"cluster.sbatch.gres='gpu:a100:4,nvme:1'\" for one, or cluster.sbatch.gres=choice(gpu:a100:4,nvme:1) ",
    ),
    "a sweep without runs": (["-m", "seed=range(1,1)"], "seed=range(1,1): has no values", "the end of a range"),
    "a pattern of numbers": (["-m", "seed=glob(*)"], "seed=glob(*): has no values", "options of a group"),
    "a pattern of no option": (["-m", "task=glob(x*)"], "task=glob(x*): has no values", "options of a group"),
    "a range without steps": (
        ["-m", "seed=range(1,3,0)"],
        "seed=range(1,3,0): is not a range",
        "range(FIRST,END,STEP)",
    ),
    "a step of nothing": (["-m", "optimizer.lr=range(0.1,1,0.0)"], "optimizer.lr=range(0.1,1,0.0): is not a range", ""),
    "a range of billions": (["-m", "seed=range(1,9999999999)"], "makes 9,999,999,998 runs", "split the sweep"),
    "too many runs": (["-m", "seed=range(0,101)", "nodes=range(0,100)"], "nodes=range(0,100): makes 10,100 runs", ""),
    "an interval": (["-m", "seed=interval(1,2)"], "seed=interval(1,2)", "add sweep=random"),
    "an unknown key of a swept group": (
        ["-m", "task=text,tokens", "task.contxt_length=5"],
        "task.contxt_length=5",
        "did you mean task.context_length",
    ),
    "parameters of a sweeper without any": (
        ["-m", "hydra.sweeper.params={seed: '1,2'}"],
        "hydra.sweeper.params={seed: '1,2'}",
        "",
    ),
    "one bad run of a sweep": (["-m", "cluster=slurm", "optimizer.lr=1e-3,0"], "optimizer.lr=0", "above 0"),
    "an unknown key in a sweep": (["-m", "trainer.max_step=1,2"], "trainer.max_step=1", "did you mean"),
    "an indivisible run of a sweep": (["-m", "cluster=slurm", "nodes=2,3"], "trainer.global_batch_size=64", "63 or 66"),
}


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def without_progress(printed):
    """What a command printed, less the progress that a sweep shows where the machine is slow."""
    return re.sub(r"^\d+ of \d+ runs composed\n", "", printed, flags=re.MULTILINE)


@pytest.mark.parametrize(("words", "named", "remedy"), MISTAKES.values(), ids=MISTAKES)
def test_one_line_and_exit_code_2(words, named, remedy, empty_folder, capfd):
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    err = without_progress(err)
    assert err.count("\n") == 1, err
    assert err.startswith("hpctrain: error: ")
    assert named in err
    assert remedy in err
    assert list(empty_folder.iterdir()) == []


def test_several_losses_of_a_sharded_model(empty_folder, monkeypatch, capfd):
    task = empty_folder / "two_losses.py"
    task.write_text(
        "from hpctrain.tasks.digits import Digits\n\n\nclass TwoLosses(Digits):\n"
        "    def loss_b(self, model, batch):\n        return self.loss(model, batch)\n"
    )
    monkeypatch.syspath_prepend(empty_folder)
    named = [*ONE_NAMED, "optimizer.named.b={_target_: torch.optim.SGD, match: a.*, loss: loss_b}"]
    of_task = ["task=custom", "task._target_=two_losses.TwoLosses", "model=convnet"]
    assert main([*TWO_RANKS, "parallel=fsdp", *of_task, *named]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "parallel.kind=mesh: doesn't work with several losses" in line
    assert "use parallel=ddp" in line
    assert [path for path in empty_folder.iterdir() if path.suffix == ".py" or path.is_dir()] == [task]


@pytest.mark.parametrize(("service", "package"), [("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_service_without_its_package_is_refused_at_submission(service, package, empty_folder, capfd):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    assert main(["cluster=slurm", f"logger.{service}.enabled=true"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f'needs the package {package}, which isn\'t installed; pip install "hpctrain[{service}]"' in line
    assert list(empty_folder.iterdir()) == []


def test_a_server_and_a_key_are_refused_where_they_are_missing_or_would_be_stored(monkeypatch, empty_folder, capfd):
    monkeypatch.setattr(checks, "_require_package", lambda *_: None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["logger.mlflow.enabled=true"]) == 2
    assert "logger.mlflow.tracking_uri=null: MLflow needs a server or a database" in capfd.readouterr().err
    assert main(["logger.wandb.enabled=true", "cluster.env.WANDB_API_KEY=abc"]) == 2
    error = capfd.readouterr().err
    assert "cluster.env.WANDB_API_KEY=***: would be in config.yaml" in error
    assert "abc" not in error
    variable = "cluster.container.env.WANDB_API_KEY"
    words = ["cluster.container.image=/a", "cluster.container.engine=oci", f"{variable}=abc"]
    assert main(["cluster=slurm", "logger.wandb.enabled=true", *words]) == 2
    assert f"{variable}=***: would be in config.yaml" in capfd.readouterr().err


@pytest.mark.parametrize("uri", ["mlruns", "/store", "file:/store"])
def test_a_folder_of_mlflow_is_refused_unless_mlflow_takes_it(uri, monkeypatch, empty_folder, capfd):
    monkeypatch.setattr(checks, "_require_package", lambda *_: None)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    words = ["cluster=slurm", "cluster.dry_run=true", "logger.mlflow.enabled=true"]
    assert main([*words, f"logger.mlflow.tracking_uri={uri}"]) == 2
    assert f"logger.mlflow.tracking_uri={uri}: is a folder, which MLflow refuses" in capfd.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert main(words) == 2
    assert "or export MLFLOW_ALLOW_FILE_STORE=true" in capfd.readouterr().err
    for other in ("sqlite:////store/mlflow.db", "databricks", "http://login1:5000"):
        assert main([*words, f"logger.mlflow.tracking_uri={other}"]) == 0
    assert main([*words, "cluster.env.MLFLOW_ALLOW_FILE_STORE=true"]) == 0
    container = ["cluster.container.image=/a", "cluster.container.engine=oci"]
    assert main([*words, *container, "cluster.container.env.MLFLOW_ALLOW_FILE_STORE=true"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda _: "3.12.1")
        assert main(words) == 0
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert main(words) == 0


NEAR_MISSES = {
    "trainer.accumulate_grad_batches=2": "set trainer.micro_batch_size",
    "gradient_accumulation_steps=2": "set trainer.micro_batch_size",
    "trainer.devices=2": "set cluster.processes_per_node=N",
    "cluster.gpus=2": "set cluster.gpus_per_node=N",
    "trainer.num_nodes=2": "set nodes=N",
    "schedule.monitor=loss": "set checkpoint.metric=NAME",
    "data.batch_size=2": "set trainer.global_batch_size (per step, over all ranks), or trainer.micro_batch_size",
    "optimizer=custom optimizer.momentum=0.9": "needs a plus: +optimizer.momentum=VALUE",
    "schedule=custom schedule.T_max=10": "needs a plus: +schedule.T_max=VALUE",
    "optimizer=custom optimizer.lrr=0.9": "did you mean optimizer.lr?",
    "logger=wandb": "set logger.wandb.enabled=true",
    "logger.wandb=true": "set logger.wandb.enabled=true",
    "logger.wandbb.enabled=true": "did you mean logger.wandb.enabled?",
    "fast_dev_run=true": "set trainer.max_steps=2",
    "precision=bf16-mixed": "choose precision=bf16",
    "precision=16": "choose precision=fp16",
    "trainer.precision=bf16": "choose precision=bf16",
    "optimizer=adam": "choose optimizer=adamw, or write optimizer=custom optimizer._target_=torch.optim.Adam",
    "optimizer=RMSprop": "write optimizer=custom optimizer._target_=torch.optim.RMSprop",
    "--experiment=vae": "write experiment=vae",
    "--trainer.max_steps=3": "write trainer.max_steps=3",
    "task=vae": "did you mean experiment=vae?",
    "task=gan.Gan": "write task=custom task._target_=gan.Gan",
    "optimizer.groups={match:a}": "write it in brackets: optimizer.groups=[{match:a}]",
    "optimizer.groups=[{matches:a}]": 'optimizer.groups[0].matches=a: is not a key of an entry; write match: "NAME.*"',
    "optimizer.groups=[{params:a}]": "optimizer.groups[0].params=a: is not a key of an entry",
}


@pytest.mark.parametrize("words", NEAR_MISSES)
def test_words_of_other_libraries_are_explained(words, tmp_path, monkeypatch, capfd):
    if "vae" in words:
        (tmp_path / "conf" / "experiment").mkdir(parents=True)
        (tmp_path / "conf" / "experiment" / "vae.yaml").write_text("# @package _global_\n")
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert NEAR_MISSES[words] in error


FLAGS = {
    "memory that is no number": (["fit-batch", "--memory-gb", "nan"], "--memory-gb: expected a number from 0.001"),
    "a negative margin": (["fit-batch", "--margin", "-1"], "--margin"),
    "the whole memory as a margin": (["fit-batch", "--margin", "1"], "--margin: expected a number from 0 to 0.99"),
    "no size to try": (["fit-batch", "--largest", "0"], "--largest: expected a whole number from 1"),
    "a negative rank": (["logs", "R", "--rank=-1"], "can't be negative"),
    "a wait that is no number": (["stacks", "R", "--wait", "nan"], "must be 0 or more"),
    "an unknown flag": (["status", "--fly"], "unrecognized arguments: --fly"),
    "no run": (["cancel"], "the following arguments are required: RUN"),
    "an unknown flag of a training": (["--fly"], "unrecognized arguments: --fly"),
    "a flag of Hydra's without a value": (["--config-dir"], "expected one argument"),
}


@pytest.mark.parametrize(("words", "named"), FLAGS.values(), ids=FLAGS)
def test_a_wrong_flag_is_one_line_too(words, named, empty_folder, capfd):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert err.startswith("hpctrain: error: ")
    assert named in err
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        ({"PMIX_RANK": "1"}, "unset PMIX_RANK"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "set FLUX_TASK_LOCAL_ID"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "unset RANK WORLD_SIZE"),
    ],
)
def test_one_of_several_processes_that_does_not_know_its_place(variables, remedy, empty_folder, monkeypatch, capfd):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert remedy in err
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize("words", [["trainer.max_step=3"], ["-m", "cluster=slurm", "optimizer.lr=1e-3,0"]])
def test_the_process_says_the_same(words, empty_folder):
    done = subprocess.run([sys.executable, "-m", "hpctrain", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert without_progress(done.stderr).count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert list(empty_folder.iterdir()) == []


VALUES = (
    *("-1", "0", "1.5", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 400, "0x10", "1e3"),
    *("", "''", "null", "true", "abc"),
    *("'a b'", "'é☃'", "'a\nb'", "'a\"b'", '"a\'b"', "'%j'", "'$(id)'", "'`id`'", "'a;b'", "'-x'", "'~/x'", "'*'"),
    *("[]", "[1,a]", "[[1]]", "{}", "{a: 1}", "{a: {b: 1}}", "[null]", "[nan,nan]", "1,2", "a,b", "range(1,3)"),
    *("'\udcff'", "'a\x00b'", "a" * 5000, "../..", "???", "'${seed}'", "${seed}", "${nope}", "${oc.env:HOME}", "[1"),
)
"""Values that hardly any key takes."""
OPTIONS = (
    [],
    ["cluster=slurm"],
    ["optimizer=sgd"],
    ["task=tokens", "task.data=."],
    ["task=image_folder", "task.data=.", "schedule=wsd"],
)


@pytest.mark.nightly
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_value_of_any_key_is_taken_or_explained(options, empty_folder):
    composer, vague = Composer(), []
    keys = flat(composer.compose(options)).keys()
    # the keys of the defaults are tried without options
    for key in keys - flat(composer.compose([])).keys() if options else keys:
        for value in VALUES:
            try:
                composer.compose([*options, f"{key}={value}"])
            except ConfigError as error:
                if error.key == "configuration" or "\n" in str(error) or len(str(error)) > 1500:
                    vague.append(str(error)[:300])
    assert vague == []
    assert list(empty_folder.iterdir()) == []
