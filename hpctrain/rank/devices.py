"""The devices of the ranks: what the configuration asks for, what a rank takes, and whether all are compatible."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch
from torch._C._distributed_c10d import Store

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.checks import refuse_without_gpu
from hpctrain.config.cluster import Slurm
from hpctrain.config.gpu_request import GpuRequest
from hpctrain.config.resources import SHARED_GPU_VARIABLE
from hpctrain.config.root import Config
from hpctrain.config.visible_gpus import VISIBLE_DEVICES, visible_gpus
from hpctrain.errors import ConfigError, DeviceError, RendezvousError
from hpctrain.phrases import counted, listed, numbered
from hpctrain.rank.rendezvous import read_refusal, share_refusal
from hpctrain.run.process import boot_id

TOPIC = "devices"
HIDDEN = re.compile(r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device is detected")
"""torch's errors where a container or a job step has no GPUs, although the driver's list in /proc shows the node's."""

log = logging.getLogger("hpctrain.train")


def choose_devices(
    environment: ClusterEnvironment, gpus_per_process: int | None, *, use_gpu: bool
) -> tuple[torch.device, ...]:
    """Choose this rank's devices: its share of the visible GPUs, or the CPU, repeated as often as it would have GPUs.

    Args:
        environment: this rank's place.
        gpus_per_process: number of GPUs; None takes every visible one.
        use_gpu: whether to use the GPUs that torch finds.
    """
    # device_count queries the driver without initialising it, and returns 0 if torch is built without CUDA
    visible = torch.cuda.device_count() if use_gpu else 0
    if not visible or not torch.cuda.is_available():
        return (torch.device("cpu"),) * (gpus_per_process or 1)
    share = gpus_per_process or visible
    first = environment.local_rank * share
    # modulo: some schedulers show a process all GPUs of the node, others only its own, as index 0
    return tuple(torch.device("cuda", (first + number) % visible) for number in range(share))


def resolve_backend(backend: str, devices: Sequence[torch.device]) -> str:
    """Return the backend for tensors on these devices.

    Args:
        backend: `nccl`, `gloo`, or `auto`: nccl on GPUs, gloo on the CPU.
        devices: of a rank.
    """
    if backend != "auto":
        return backend
    return "nccl" if devices[0].type == "cuda" else "gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevices:
    """The devices of one rank, as it reports them to the others.

    Attributes:
        rank: that has them.
        host: the name of its machine.
        machine: distinguishes machines with the same name.
        gpus: their addresses on the PCI bus, such as ``0000:17:00.0``; empty on the CPU. The slices of a GPU that
            NVIDIA's MIG makes have the same address, and NCCL takes them for the same GPU.
        name: of the first GPU.
        visible: the variables that hide GPUs from this rank, such as CUDA_VISIBLE_DEVICES.
        problem: why the rank can't use the devices that the run asks for; empty if it can.
        machine_at_fault: whether the machine is the cause of the problem, and not the configuration.
    """

    rank: int
    host: str
    machine: str = ""
    gpus: Sequence[str] = ()
    name: str = ""
    visible: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    machine_at_fault: bool = True

    @classmethod
    def of(cls, rank: int, devices: Sequence[torch.device], visible: Mapping[str, str]) -> RankDevices:
        """Describe the devices of this process.

        Args:
            rank: of this process.
            devices: that it takes.
            visible: as the attribute.

        Raises:
            DeviceError: a GPU doesn't answer.
        """
        host = socket.gethostname()
        gpus = [device for device in devices if device.type == "cuda"]
        try:
            properties = [torch.cuda.get_device_properties(device) for device in gpus]
        except RuntimeError as error:
            which, problem = " ".join(map(str, gpus)), _first_line(error)
            raise DeviceError(f"can't query {which} on {host}: {problem}; run nvidia-smi or rocm-smi there") from error
        return cls(
            rank=rank,
            host=host,
            machine=boot_id() or host,  # containers may have the same host name
            gpus=[_address(gpu) for gpu in properties],
            name=properties[0].name if properties else "",
            visible=visible,
        )


@dataclass(frozen=True, slots=True)
class DeviceConflict:
    """Conflict between the devices of ranks.

    Attributes:
        ranks: that report it, and to which the others point.
        message: what was expected, what was found, and what to do.
        machine_at_fault: whether a machine is at fault, and not the configuration.
    """

    ranks: Sequence[int]
    message: str
    machine_at_fault: bool


def find_conflict(reports: Sequence[RankDevices], backend: str) -> DeviceConflict | None:
    """Compare the devices of all ranks; return the first conflict, or None.

    Args:
        reports: of all ranks, in rank order.
        backend: `nccl`, `gloo` or `auto`.
    """
    broken = [report for report in reports if report.problem]
    if broken:
        return DeviceConflict([report.rank for report in broken], broken[0].problem, broken[0].machine_at_fault)
    with_gpu = next((report for report in reports if report.gpus), None)
    without = [report for report in reports if not report.gpus]
    if with_gpu is not None and without:
        hosts = listed(dict.fromkeys(report.host for report in without), separator=" ")
        ranks = [report.rank for report in without]
        return DeviceConflict(
            ranks,
            f"{numbered('rank', ranks)} on {hosts} found no GPU, but rank {with_gpu.rank} on {with_gpu.host} found one "
            f"({with_gpu.name}), and all ranks must train on the same type of device: run nvidia-smi or "
            f"rocm-smi on {hosts}, or set cluster.gpus_per_node=0 to train on CPUs",
            machine_at_fault=True,
        )
    # RCCL itself decides about the partitions of an AMD GPU, which have the same address
    if with_gpu is not None and backend != "gloo" and not torch.version.hip and not os.environ.get(SHARED_GPU_VARIABLE):
        return next(_duplicate_gpus(reports), None)
    return None


def _duplicate_gpus(reports: Sequence[RankDevices]) -> Iterator[DeviceConflict]:
    """Two ranks with the same GPU, which NCCL refuses ("Duplicate GPU detected")."""
    owners: dict[tuple[str, str], RankDevices] = {}
    for report in reports:
        for gpu in report.gpus:
            owner = owners.setdefault((report.machine, gpu), report)
            if owner is not report:
                yield DeviceConflict(
                    [0],  # of a configuration that can't work, it alone reports it
                    f"{numbered('rank', [owner.rank, report.rank])} on {report.host} have the same GPU ({gpu}, "
                    f"{report.name}; {_visibility(owner)}, {_visibility(report)}), but with NCCL every rank needs its "
                    "own, and MIG slices of one GPU count as the same: start at most one process per GPU "
                    "(cluster.processes_per_node), remove options that bind GPUs from cluster.srun_args, or use "
                    "parallel.backend=gloo",
                    machine_at_fault=False,
                )


def require_compatible_devices(store: Store, report: RankDevices, world_size: int, backend: str) -> None:
    """Compare the devices of all ranks through the store, before they make a process group; collective.

    Args:
        store: that the ranks share.
        report: of this rank.
        world_size: number of ranks.
        backend: `nccl`, `gloo` or `auto`.

    Raises:
        DeviceError: they aren't compatible. On ranks that aren't at fault, it points at the others.
        RendezvousError: on rank zero, if a rank reported none before the store's timeout; names it.
    """
    store.set(_key(report.rank), json.dumps(asdict(report)))
    if report.rank == 0:
        conflict = find_conflict(_reported_devices(store, world_size), backend)
        refusal = "" if conflict is None else json.dumps(asdict(conflict))
        share_refusal(store, TOPIC, refusal, world_size - 1)
    else:
        refusal = read_refusal(store, TOPIC)
    if refusal:
        conflict = DeviceConflict(**json.loads(refusal))
        elsewhere = report.rank not in conflict.ranks
        raise DeviceError(conflict.message, machine_at_fault=conflict.machine_at_fault, elsewhere=elsewhere)


def _reported_devices(store: Store, world_size: int) -> list[RankDevices]:
    try:
        return [RankDevices(**json.loads(store.get(_key(rank)))) for rank in range(world_size)]
    except RuntimeError as error:  # which a store raises after its timeout
        missing = [rank for rank in range(world_size) if not store.check([_key(rank)])]
        problem = f"{numbered('rank', missing)} did not report any devices in time; check their logs"
        raise RendezvousError(problem, waited=True) from error


def _key(rank: int) -> str:
    return f"hpctrain/devices/{rank}"


def _address(properties: object) -> str:
    """The address on the PCI bus; the GPU's UUID, if this version of torch doesn't report the address."""
    try:
        domain, bus, device = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    except AttributeError:
        return str(getattr(properties, "uuid", ""))
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _visibility(report: RankDevices) -> str:
    visible = [f"{name}={value}" for name, value in report.visible.items()]
    return f"rank {report.rank} sees {listed(visible) or 'all GPUs'}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def choose_compatible_devices(
    environment: ClusterEnvironment, config: Config, store: Store | None
) -> tuple[torch.device, ...]:
    """Choose this rank's devices, and compare them with the other ranks'; collective.

    Before there is a group: a rank with a broken driver would choose gloo and the others NCCL, and all would wait for
    half an hour; two ranks on one GPU would end in an error of NCCL that doesn't say why.

    Args:
        environment: this rank's place.
        config: of the run.
        store: of the ranks; None in a world of one.

    Raises:
        ConfigError: the configuration, or this build of torch, doesn't fit the devices.
        DeviceError: a GPU is missing or doesn't answer, some ranks have none, or two have the same.
        RendezvousError: a rank reported no devices in time.
    """
    number = environment.rank
    visible = {name: os.environ[name] for name in VISIBLE_DEVICES if name in os.environ}
    try:
        devices = choose_own_devices(environment, config)
        report = RankDevices.of(number, devices, visible)
    except (ConfigError, DeviceError) as error:
        if store is not None:
            # the others would wait for this rank's devices
            at_fault, host = isinstance(error, DeviceError), socket.gethostname()
            report = RankDevices(rank=number, host=host, problem=str(error), machine_at_fault=at_fault)
            with suppress(DeviceError):
                require_compatible_devices(store, report, environment.world_size, config.parallel.backend)
        raise
    if store is not None:
        require_compatible_devices(store, report, environment.world_size, config.parallel.backend)
    return devices


def choose_own_devices(environment: ClusterEnvironment, config: Config) -> tuple[torch.device, ...]:
    """Choose this rank's devices: the GPUs that its configuration asks for, or the CPU if it asks for none.

    Raises:
        ConfigError: torch finds no GPU, and the configuration or this build of torch shows that none is to be had.
        DeviceError: torch finds no GPU, although the configuration requests GPUs, or the driver lists some.
    """
    cluster = config.cluster
    gpus_per_node = cluster.node_gpus
    # a site without cgroups shows all GPUs to a SLURM job that requested none: leave them alone
    use_gpu = gpus_per_node != 0 and not (gpus_per_node is None and isinstance(cluster, Slurm))
    gpus_per_process = None if config.parallel.kind == "data_parallel" else cluster.gpus_per_process
    devices = choose_devices(environment, gpus_per_process, use_gpu=use_gpu)
    if devices[0].type == "cuda":
        return devices
    if use_gpu:
        _refuse_missing_gpus(cluster.gpus, is_rank_zero=environment.rank == 0)
    refuse_without_gpu(config, f"find out why torch finds no GPU on {socket.gethostname()} (nvidia-smi)")
    return devices


def _refuse_missing_gpus(request: GpuRequest, *, is_rank_zero: bool) -> None:
    """Raise if there should be a GPU where torch finds none."""
    host = socket.gethostname()
    key, value = request.setting
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        without = f"torch {torch.__version__} on {host} is built without CUDA"
        if request.count:
            remedy = f"install a build with CUDA (pytorch.org), or {request.cpu_remedy} to train on the CPU"
            raise ConfigError(key, value, without, remedy)
        if is_rank_zero and (num_visible := visible_gpus(os.environ, build="cuda")):
            log.warning("%s has %s, but %s: training on the CPU", host, counted(num_visible, "GPU"), without)
        return
    num_visible, why = visible_gpus(os.environ) or 0, _driver_error()
    if not request.count and (not num_visible or HIDDEN.search(why)):
        return
    promise = f"the driver lists {counted(num_visible, 'GPU')}"
    if request.count:
        promise = f"{key}={value}"
    raise DeviceError(
        f"torch finds no GPU on {host}, but {promise}{why and f' ({why})'}: run nvidia-smi or rocm-smi there, or "
        f"{request.cpu_remedy} to train on the CPU"
    )


def _driver_error() -> str:
    """Return the first line of the driver's error; empty if CUDA can be initialised."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except Exception as error:  # whatever a broken driver raises is the answer
        return _first_line(error)
    return ""
