"""What keeps values for later: each function returns what is kept of a module, whose weights then change in place."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from hpctrain.callbacks.average_weights import AverageWeights
from hpctrain.checkpoint.host_memory import HostCopy
from hpctrain.data.micro_batch import iterate_tensors, map_tensors
from hpctrain.metrics.media import HostArray
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.tasks import Metric, Task
from hpctrain.tasks.position import Position
from hpctrain.train.callbacks import Callbacks
from hpctrain.train.ema import Ema
from hpctrain.train.evaluation_results import Gathering
from hpctrain.train.task_metrics import build_metrics
from hpctrain.train.task_state import TaskState

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64)


class Ones(nn.Module):
    def __init__(self, device, dtype):
        super().__init__()
        ones = torch.ones(3, device=device).to(dtype)
        self.weight = nn.Parameter(ones, requires_grad=dtype.is_floating_point or dtype.is_complex)
        self.register_buffer("count", ones.clone())


class Keeper(Metric):
    """Keeps what it gets, as one value and in a list."""

    def __init__(self):
        self.add_state("newest", torch.zeros(()), reduce="max")
        self.add_state("all", reduce="cat")

    def update(self, tensor):
        self.newest = tensor
        self.all += [tensor, tensor[1:]]

    def compute(self):
        return 0.0


class Keeping(Task):
    def __init__(self, model):
        self.model, self.keeper = model, Keeper()

    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError

    def build_metrics(self):
        return {"kept": self.keeper}

    def state_dict(self):
        return {"weight": self.model.weight}

    def load_state_dict(self, state):
        pass


def _world(module):
    return TrainingWorld(rank=0, size=1, local_rank=0, devices=(module.weight.device,))


def _averaging(module, **options):
    callback, position = AverageWeights(0.0, **options), Position(5, 10)
    position.step = 1
    weights = dict(module.state_dict())
    callback.after_step(SimpleNamespace(rank=0, position=position, weights=lambda: weights))
    return callback


def average(module):
    return _averaging(module).terms


def last_averages(module):
    return _averaging(module, num_last=2).terms


def state_of_a_callback(module):
    callbacks, average = {"average": AverageWeights(0.0)}, {"count": 1, "kept": [dict(module.state_dict())]}
    Callbacks(callbacks).load_state({"callbacks": {"average": average}})
    return callbacks["average"].terms


def moving_average(module):
    return Ema(module, 0.5).averages


def means(module):
    number, device = module.weight[0], module.weight.device
    if number.is_complex():
        return []
    meter = Meter(device)
    meter.add_mean("mean", number, 1)
    meter.add_value("value", number, count=number)
    meter.add_sum("sum", number, number)
    return [meter._sums, meter._counts]


def states_of_metrics(module):
    task = Keeping(module)
    metrics = build_metrics(task, _world(module))
    for tensor in (module.weight.detach(), module.count):
        task.keeper.update(tensor)
        metrics.copy_shared(module)
    return [task.keeper.newest, task.keeper.all]


def values_per_sample(module):
    gathering = Gathering("evaluate", _world(module))
    gathering.add(0, 3, {"weight": module.weight, "count": module.count})
    gathering._settle()
    return [column.parts for column in gathering._columns.values()]


def media(module):
    return torch.as_tensor(HostArray(module.weight).values())


def state_of_the_task(module):
    state = TaskState(Keeping(module), _world(module))
    return [state.snapshot(), state._copy()["state"]]


def checkpoint(module):
    host = HostCopy()
    copied = host.of(dict(module.state_dict()))
    host.finish()
    return copied


KEEPERS = (
    *(average, last_averages, state_of_a_callback, moving_average, means, states_of_metrics, values_per_sample),
    *(media, state_of_the_task, checkpoint),
)


def require_own(keeper, device, dtype):
    """Require that a keeper's values are the same after the module's have changed, and lie elsewhere."""
    module = Ones(torch.device(device), dtype)
    values = keeper(module)
    before = map_tensors(torch.clone, values)
    with torch.no_grad():
        for tensor in (module.weight, module.count):
            tensor.fill_(7)
    shared = {tensor.untyped_storage().data_ptr() for tensor in (module.weight, module.count)}
    for own, earlier in zip(iterate_tensors(values), iterate_tensors(before), strict=True):
        assert torch.equal(own, earlier)
        assert own.untyped_storage().data_ptr() not in shared
