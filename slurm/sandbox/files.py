"""The text of the files that SLURM reads, as functions of the sandbox's record alone."""

from __future__ import annotations

from pathlib import Path

from cgroups import Groups
from home import CONTROLLER, Record
from options import CPUS_PER_NODE, GPUS_PER_NODE, MEMORY_PER_NODE_MB
from version import unpacked

DATABASE_PASSWORD = "sandbox"  # reachable from the controller's own network namespace only


def hosts(record: Record, host_name: str) -> str:
    """/etc/hosts of every machine of the sandbox."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{record.address(machine)} {machine}" for machine in [*record.options.node_names, CONTROLLER]]
    if host_name not in {*record.options.node_names, CONTROLLER}:
        lines.append(f"{record.address('host')} {host_name}")
    return "\n".join(lines) + "\n"


def slurm_conf(home: Path, record: Record, groups: Groups) -> str:
    """slurm.conf: short timers, nodes that claim more than the machine has, and two partitions that preempt."""
    options, mode = record.options, record.options.preempt_mode
    lines = [
        *_controller(home, record),
        *_timers(record),
        f"ProctrackType=proctrack/{'cgroup' if groups.version and not options.signal_children else 'linuxproc'}",
        f"TaskPlugin=task/{'cgroup' if options.memory_limits else 'none'}",
        f"JobAcctGatherType=jobacct_gather/{'linux' if options.accounting else 'none'}",
        "MailProg=/bin/true",
        "SwitchType=switch/none",
        f"MpiDefault={options.mpi_default}",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"DefMemPerCPU={MEMORY_PER_NODE_MB // CPUS_PER_NODE}",
        f"GresTypes=gpu{',nvme' * options.gpu_types}",
        "SlurmdParameters=config_overrides",
        f"JobRequeue={int(options.requeue)}",
        "ReturnToService=2",
        "PreemptType=preempt/partition_prio",
        f"PreemptMode={mode}",
        *(_node(record, name) for name in options.node_names),
        "PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE",
        f"PartitionName=low Default=YES PriorityTier=1 PreemptMode={mode} GraceTime={options.grace_time_s}",
        *(_every_preemption(options.grace_time_s) if options.every_preemption else []),
        "PartitionName=high PriorityTier=2 PreemptMode=OFF",
        *(
            f"PartitionName={kind} Nodes={','.join(names)}"
            for kind, names in options.nodes_by_gpu_type.items()
            if names
        ),
    ]
    return "\n".join(lines) + "\n"


def daemons_conf(home: Path, record: Record, groups: Groups) -> str:
    """slurm.conf as the machines read it, with short timeouts, or a node's death would show late.

    Commands on the host keep SLURM's own: 10 s for an answer and 2 s to connect, since a busy machine may answer late.
    """
    answer_s = max(2, record.options.node_timeout_s * 3 // 10)  # with 10 s it takes 27 s to see any node's death
    return slurm_conf(home, record, groups) + f"MessageTimeout={answer_s}\nTCPTimeout={answer_s // 2}\n"


def gres_conf(home: Path, record: Record) -> str:
    """gres.conf: GPUs that are counted and bound as real ones are."""
    gpus = f"Name=gpu File={home}/gpu[0-{GPUS_PER_NODE - 1}]"
    lines = [
        f"NodeName={','.join(names)} {gpus} Type={gpu_type}"
        for gpu_type, names in record.options.nodes_by_gpu_type.items()
        if names
    ]
    return "\n".join([*lines, "Name=nvme Count=2"] if lines else [gpus]) + "\n"


def cli_filter_lua(gpu_form: str) -> str:
    """cli_filter.lua: sbatch refuses GPUs in other forms, and without a type, with an error of this site's own."""
    return f"""\
function slurm_cli_pre_submit(options, offset)
  for _, form in ipairs({{"gpus", "gpus-per-node", "gres", "gpus-per-task"}}) do
    local value = options["type"] == "sbatch" and options[form] or ""
    if form ~= "gres" and value ~= "" or value:find("gpu") then
      if form ~= "{gpu_form}" or not value:find("%a+%d+:") then
        slurm.log_error("this site takes GPUs by --{gpu_form} only, with a type")
        return slurm.ERROR
      end
    end
  end
  return slurm.SUCCESS
end

function slurm_cli_setup_defaults(options, early)
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
  return slurm.SUCCESS
end
"""


def topology_conf(record: Record) -> str:
    """topology.conf: the last nodes are on the first switch."""
    names = record.options.node_names
    halves = [half for half in (names[len(names) // 2 :], names[: len(names) // 2]) if half]
    lines = [f"SwitchName=s{number} Nodes={','.join(half)}" for number, half in enumerate(halves, 1)]
    return "\n".join([*lines, f"SwitchName=top Switches=s[1-{len(lines)}]"]) + "\n"


def cgroup_conf(home: Path, groups: Groups) -> str:
    """cgroup.conf: SLURM's control groups are where the machines have mounted them."""
    if groups.version == 0:
        return "CgroupPlugin=cgroup/v1\n"  # which does nothing until it is used
    lines = [f"CgroupPlugin=cgroup/v{groups.version}", f"CgroupMountpoint={home}/cgroup"]
    lines += ["IgnoreSystemd=yes"] if groups.version == 2 else []
    if "memory" in groups.controllers:
        lines += ["ConstrainRAMSpace=yes"]
        lines += ["ConstrainSwapSpace=yes", "AllowedSwapSpace=0"] if groups.limits_swap else []
    return "\n".join(lines) + "\n"


def oci_conf(home: Path) -> str:
    """oci.conf: containers of runc, whose ids differ between nodes, jobs, steps and tasks."""
    runc, name = f"runc --root={home}/runc/%n", "%n.%j.%s.%t"
    lines = [
        # with true, SLURM 22.05 leaves the folder of each container behind
        "CreateEnvFile=false",
        # SLURM asks for these after the task's own process has ended: what is left in the container has to end, too
        f'RunTimeQuery="{runc} state {name}"',
        f'RunTimeKill="{runc} kill --all {name} KILL"',
        f'RunTimeDelete="{runc} delete --force {name}"',
        # SLURM has a shell execute the line; without exec, SIGTERM would end the shell alone, and with it the task
        f'RunTimeRun="exec {runc} run --bundle %b {name}"',
    ]
    return "\n".join(lines) + "\n"


def slurmdbd_conf(home: Path) -> str:
    """slurmdbd.conf; it holds a password, so SLURM wants its mode to be 0600."""
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={home}/munge/socket",
        f"DbdHost={CONTROLLER}",
        "SlurmUser=root",
        f"LogFile={home}/log/slurmdbd.log",
        f"PidFile={home}/slurmdbd.pid",
        *_plugins(),
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        "StorageUser=slurm",
        f"StoragePass={DATABASE_PASSWORD}",
        "StorageLoc=slurm",
    ]
    return "\n".join(lines) + "\n"


def _controller(home: Path, record: Record) -> list[str]:
    parameters_by_name = {
        "preempt_send_user_signal": record.options.preempt_send_user_signal,
        "enable_expedited_requeue": record.options.expedite,
    }
    parameters = ",".join(name for name, is_set in parameters_by_name.items() if is_set)
    accounting = [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={record.address(CONTROLLER)}",  # the host knows no names
        f"AccountingStoragePass={home}/munge/socket",  # with munge, this is where its socket is
    ]
    return [
        f"ClusterName={home.name}",
        f"SlurmctldHost={CONTROLLER}({record.address(CONTROLLER)})",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={home}/munge/socket,cred_expire=5",
        "CredType=cred/munge",
        f"StateSaveLocation={home}/state",
        *_plugins(),
        f"SlurmdSpoolDir={home}/spool",
        f"SlurmctldPidFile={home}/slurmctld.pid",
        f"SlurmdPidFile={home}/spool/slurmd.pid",
        f"SlurmctldLogFile={home}/log/slurmctld.log",
        f"SlurmdLogFile={home}/log/%n.log",
        f"MaxArraySize={record.options.max_array_size}",
        *([f"SlurmctldParameters={parameters}"] if parameters else []),
        *(["TopologyPlugin=topology/tree"] if record.options.switches else []),
        *(["CliFilterPlugins=cli_filter/lua"] if record.options.gpu_form != "any" else []),
        *(accounting if record.options.accounting else []),
    ]


def _plugins() -> list[str]:
    """Where the plugins are, unless it is where this machine's package has them."""
    return [] if (folder := unpacked()) is None else [f"PluginDir={folder}/plugins"]


def _timers(record: Record) -> list[str]:
    return [
        "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2",
        "KillWait=20",
        f"SlurmdTimeout={record.options.node_timeout_s}",
        "MinJobAge=300",
    ]


def _every_preemption(grace_time_s: int) -> list[str]:
    return [
        f"PartitionName=low_{mode.lower()}{suffix} PriorityTier=1 PreemptMode={mode} GraceTime={seconds}"
        for mode in ("REQUEUE", "CANCEL")
        for suffix, seconds in (("", grace_time_s), ("_0", 0))
    ]


def _node(record: Record, name: str) -> str:
    return (
        f"NodeName={name} NodeAddr={record.address(name)} CPUs={CPUS_PER_NODE} Sockets=1 "
        f"CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 RealMemory={MEMORY_PER_NODE_MB} "
        f"Gres={record.options.gres(name)}"
    )
