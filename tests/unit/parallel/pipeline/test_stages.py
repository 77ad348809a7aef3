"""The stages of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import ConfigError, TaskError
from hpctrain.models.gpt import GPT
from hpctrain.parallel.pipeline.plan import stages_of
from hpctrain.parallel.pipeline.random_streams import RandomStreams
from hpctrain.parallel.pipeline.stages import Stages

GPT_PLAN = [("tokens", "places", "dropout"), "blocks.*", ("norm", "head", "tokens")]
TOKENS = torch.arange(8)[None] % 5


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=11, context_length=8, num_layers=4, num_heads=2, width=8)


def cut(model: nn.Module, position: int, degree: int = 2, num_stages: int = 2) -> Stages:
    return Stages(model, stages_of(model, GPT_PLAN, num_stages), position, degree)


def run(stages: Stages, own: int, given: Any, tokens: Tensor = TOKENS) -> Any:
    streams = RandomStreams(0, ())
    with streams.of_task(0):
        return stages.compute(own, lambda model: model(tokens), lambda: given, streams, stages.model)


@pytest.mark.parametrize(("degree", "num_stages"), [(2, 2), (2, 4), (3, 3), (1, 3)])
def test_stages_together_compute_the_model(degree: int, num_stages: int) -> None:
    model, given = gpt(), None
    stages = [cut(model, position, degree, num_stages) for position in range(degree)]
    for index in range(num_stages):
        given = run(stages[index % degree], index // degree, given)
    assert given is not None
    torch.testing.assert_close(given, model(TOKENS), rtol=0, atol=0)
    # outside of a pass, everything is in its place
    assert "forward" not in vars(model)
    assert model.places.weight is not None


def test_absent_parameters_are_those_of_other_positions() -> None:
    model = gpt()
    stages = cut(model, 0)
    absent = stages.absent_parameters()
    held = {name for name, parameter in model.named_parameters() if parameter not in absent}
    assert {name.split(".")[0] for name in held} == {"tokens", "places", "blocks"}
    assert all(name.startswith(("tokens", "places", "blocks.0", "blocks.1")) for name in held)
    for parameter in absent:
        parameter.data = torch.empty(0)
    assert run(stages, 0, None).shape == (1, 8, 8)


def test_a_parameter_of_two_stages_counts_at_the_first_position() -> None:
    first, last = cut(gpt(), 0), cut(gpt(), 1)
    assert first.shared == last.shared == {"tokens.weight": (0, 1)}
    assert first.copies == frozenset()
    assert last.copies == {"tokens.weight"}
    assert (first.is_last, last.is_last) == (False, True)


def test_what_belongs_to_the_model_itself_is_in_all_stages() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model.register_buffer("count", torch.zeros(1))
    for position in range(2):
        stages = Stages(model, [["0"], ["1"]], position, 2)
        assert {parameter.shape for parameter in stages.absent_parameters()} == {(2, 2), (2,)}
        assert stages.shared == {"scale": (0, 1)}
        assert stages.copies == ({"scale", "count"} if position else frozenset())


def test_absent_parameters_can_be_set_aside() -> None:
    model = gpt()
    stages = cut(model, 1)
    with stages.absent_set_aside():
        assert "places.weight" not in dict(model.named_parameters())
    assert "places.weight" in dict(model.named_parameters())


class Glued(nn.Module):
    """Chains of modules, with code between them that belongs to one stage."""

    def __init__(self, glue: str) -> None:
        super().__init__()
        self.glue = glue
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        if self.glue == "residual":
            return values + self.layers[3](self.layers[2](values + self.layers[1](self.layers[0](values))))
        if self.glue == "end":
            return self.layers[3](self.layers[2](self.layers[1](self.layers[0](values)))) * 2
        if self.glue == "other input":
            values = self.layers[0](values)
            return self.layers[3](self.layers[2](values)) + self.layers[1](torch.ones_like(values))
        values = self.layers[1](self.layers[0](values))
        values = values + self.layers[1].bias if self.glue == "weights" else values
        return self.layers[3](self.layers[2](values))


@pytest.mark.parametrize(
    ("glue", "stage", "problem"),
    [
        ("residual", 0, r"in stage 0 .* calls layers\.2, .* something else than what this stage has computed"),
        ("end", 0, r"in stage 0 .* returns something else than what this stage has computed: .*`if self\.head:`"),
        ("other input", 1, r"calls layers\.1, .* than what the stage before returned: .*`if self\.layers\.1:`"),
    ],
)
def test_code_between_the_modules_of_other_stages_is_refused(glue: str, stage: int, problem: str) -> None:
    """A placeholder returns its first argument: `x + self.attention(x)` would become `x + x`."""
    names = [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
    if glue == "residual":
        names = [["layers.0"], ["layers.1", "layers.2", "layers.3"]]
    with pytest.raises(TaskError, match=problem):
        run(Stages(Glued(glue), names, stage, 2), 0, torch.ones(1, 2), torch.ones(1, 2))


def test_placeholders_say_what_to_do() -> None:
    stages = Stages(Glued("weights"), [["layers.0", "layers.1"], ["layers.2", "layers.3"]], 1, 2)
    with pytest.raises(
        AttributeError, match=r"another stage .* has the module layers\.1, whose bias .* `if self\.layers\.1:`"
    ):
        run(stages, 0, torch.ones(1, 2), torch.ones(1, 2))


def test_what_is_computed_again_has_to_be_whole() -> None:
    stages = cut(gpt(), 0)
    stages.require_whole(["blocks.1", "norm"])
    with pytest.raises(
        ConfigError, match=r"activation_checkpointing=blocks: is cut by the pipeline, .* write blocks\.\*"
    ):
        stages.require_whole(["blocks"])


def test_a_task_calls_the_model_once() -> None:
    stages, streams = cut(gpt(), 1), RandomStreams(0, ())
    given = torch.zeros(1, 8, 8)
    for compute, problem in (
        (lambda model: model(TOKENS) + model(TOKENS), "this task calls it twice"),
        (lambda model: torch.ones(()), "this task hasn't called it"),
    ):
        with streams.of_task(0), pytest.raises(TaskError, match=problem):
            stages.compute(0, compute, lambda: given, streams, stages.model)


def test_a_stage_returns_tensors() -> None:
    class Dicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, values: Tensor) -> Any:
            return {"values": self.second(self.first(values))}

    with pytest.raises(TaskError, match="a stage of the pipeline returned dict"):
        run(Stages(Dicts(), [["first"], ["second"]], 0, 2), 0, None, torch.ones(1, 2))


def test_activations_may_be_several_tensors_and_come_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, values: Any, scale: float = 1.0) -> Any:
            if not self.second:
                return self.first(values), values
            hidden, skipped = values if isinstance(values, tuple) else (self.first(values), values)
            return self.second(hidden) * scale + skipped

    model = Two()
    names, streams, values = [["first"], ["second"]], RandomStreams(0, ()), torch.ones(1, 2)
    given: Any = None
    for position in range(2):
        with streams.of_task(0):
            given = Stages(model, names, position, 2).compute(
                0, lambda model: model(values=values, scale=3.0), lambda given=given: given, streams, model
            )
    torch.testing.assert_close(given, model(values, 3.0))
