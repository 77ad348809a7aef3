"""Checkpoints that all ranks write: every mesh reads them bit for bit, and no mistake of a rank leaves half of one."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.read import load
from hpctrain.checkpoint.restore import restore_weights
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from tests.multiprocess.programs.sharded_saves import Tied


@pytest.fixture
def together(ranks):
    """Call a function of `sharded_saves` on all ranks; returns their results."""

    def run(function, *arguments, world_size, **options):
        call = [str(arguments[0]), *arguments[1:]]
        done = ranks(f"sharded_saves:{function}", *call, options, world_size=world_size)
        assert not [each.output for each in done if each.code], "\n".join(each.output for each in done)
        return [each.result for each in done]

    return run


@pytest.mark.parametrize(
    ("world_size", "degrees"),
    [
        (4, {"replicate_degree": 2}),
        *[
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [(4, {}), (3, {}), (2, {"replicate_degree": 2}), (8, {"replicate_degree": 2})]
        ],
    ],
    ids=str,
)
def test_every_mesh_reads_what_a_mesh_has_written_bit_for_bit(together, tmp_path, world_size, degrees):
    saved = together("save", tmp_path, world_size=world_size, **degrees)
    for other_size, other in [(4, {}), (3, {}), (4, {"replicate_degree": 2}), (2, {}), (2, {"replicate_degree": 2})]:
        for found in together("restore", tmp_path, world_size=other_size, **other):
            assert found == {"wrong": [], "rng": ["rng"] * world_size, "step": 2}
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    elements = sum(value.nbytes for name, value in expected.items() if name != "head.weight")
    # each rank knows its own part
    assert sum(found["size"] for found in saved) / world_size == pytest.approx(elements, rel=0.1)
    model = Tied()
    directory = RunDirectory.at(tmp_path)
    saved = load(directory.checkpoint(2))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    restore_weights(saved.states, model, {"": optimizer})
    assert model.head.weight is model.embedding.weight
    assert saved.model["head.weight"] is saved.model["embedding.weight"]
    for name, value in model.named_parameters(remove_duplicate=False):
        assert torch.equal(value, expected[name])
    for number, state in enumerate(optimizer.state.values()):
        assert all(torch.equal(value, expected[f"{number} {key}"]) for key, value in state.items())
    index = json.loads((directory.checkpoint(2) / "index.json").read_text())
    assert index["model.head.weight"] == index["model.embedding.weight"], "tied weights are written once"


@pytest.mark.nightly
def test_the_digest_is_that_of_any_other_mesh(together, tmp_path):
    """Before the first step, which adds up in another order."""
    digests = set()
    for number, (world_size, degrees) in enumerate([(4, {}), (2, {}), (4, {"replicate_degree": 2})]):
        folder = tmp_path / str(number)
        together("save", folder, world_size=world_size, steps=0, **degrees)
        digests.add(list_checkpoints(RunDirectory.at(folder))[0].weights_digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    "background",
    [True, pytest.param(False, marks=pytest.mark.nightly)],
    ids=["in the background", "while training waits"],
)
@pytest.mark.parametrize(
    ("kind", "rank", "told"),
    [
        ("memory", 2, "rank 2: no memory for a copy"),
        ("disk", 1, "rank 1: No space left on device"),
        *[
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("state", 0, "odd"),
                ("disk", 0, "rank 0: No space left on device"),
                ("superseded", 0, "SupersededError"),
            ]
        ],
    ],
)
def test_a_mistake_of_one_rank_is_raised_on_rank_zero_and_leaves_nothing(
    together, tmp_path, background, kind, rank, told
):
    results = together("save_with_mistake", tmp_path, rank, kind, background, world_size=3)
    leader, *others = results
    assert [found["raised"] for found in others] == [[], []]
    assert [step for step, _ in leader["raised"]] == ([2, 3] if kind == "superseded" else [2])
    assert told in leader["raised"][0][1]
    assert leader["steps"] == ([1] if kind == "superseded" else [1, 3])
    assert leader["left"] == []


def test_a_model_of_another_shape_is_refused_with_the_names(together, tmp_path):
    together("save", tmp_path, world_size=2)
    model = Tied()
    model.few = nn.Parameter(torch.zeros(2, 6))
    with pytest.raises(Exception, match=r"few \(float32\[1, 6\] saved, float32\[2, 6\] here\)"):
        restore_weights(load(RunDirectory.at(tmp_path).checkpoint(2)).states, model)
