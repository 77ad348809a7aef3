"""Metric objects and values per sample: each held-out sample once, in the order of the dataset, at any world size."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch


@pytest.fixture
def score(ranks):
    def run(world_size, num_samples=11, micro_batch_size=2, *, fails="", with_torchmetrics=False, tried=0):
        arguments = num_samples, micro_batch_size, fails, with_torchmetrics, tried
        done = ranks("scoring:be_rank", *arguments, world_size=world_size)
        assert all(process.code == 0 for process in done), "\n".join(process.output for process in done)
        return [process.result for process in done]

    return run


def extremes(numbers, shown):
    return {
        "eval/extremes/total/0": 100 + numbers.sum().item(),
        "eval/extremes/total/1": numbers.square().sum().item(),
        "eval/extremes/count": len(numbers),
        "eval/extremes/lowest": 0,
        "eval/extremes/highest": len(numbers) - 1,
        "eval/extremes/num_shown": len(shown),
        "eval/extremes/sum_shown": sum(shown),
    }


def share(num_samples, world_size, kind, size=2):
    """The numbers of the batches' first, third ... samples, which depend on how the ranks share them."""
    if kind == "stream":
        return list(range(0, num_samples, size))
    edges = [num_samples * rank // world_size for rank in range(world_size + 1)]
    return [first for begin, end in itertools.pairwise(edges) for first in range(begin, end, size)]


@pytest.mark.parametrize(
    ("world_size", "num_samples"),
    [
        (1, 11),
        (3, 11),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [(2, 11), (2, 1), (3, 2), (3, 30)]),
    ],
)
def test_every_sample_once_in_the_order_of_the_dataset_at_any_world_size(score, world_size, num_samples):
    numbers = torch.arange(num_samples)
    zero, *others = score(world_size, num_samples)
    for kind in ("numbers", "stream"):
        found = zero[kind]
        assert "error" not in found, found
        assert found["gathered"] == {
            "numbers": [[float(number)] for number in numbers.tolist()],
            "flags": [[number > 2] for number in numbers.tolist()],
            "ragged": [list(range(number % 3)) for number in numbers.tolist()],
            "large": [[0.0]] * num_samples,
        }
        assert found["dtypes"] == {
            "numbers": "torch.float32",
            "flags": "torch.bool",
            "ragged": "torch.int16",
            "large": "torch.bfloat16",
        }
        expected = extremes(numbers, share(num_samples, world_size, kind))
        expected |= {"eval/sum": numbers.double().mean().item(), "eval/first": 0}
        expected |= {"eval/of/each": max(0, num_samples - 3) / num_samples, "eval/of/two/0": 1, "eval/of/two/1": 2.5}
        assert found["means"] == expected
        assert (found["same"], found["states"]) == (True, 0)
        for other in others:
            assert (other[kind]["means"], other[kind]["same"], other[kind]["gathered"]) == (expected, True, [])


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_too_much_is_refused_on_all_ranks_alike(score, world_size):
    expected = (
        "ConfigError: trainer.max_gathered_mb=1: rank zero would get 3 MB, 200007 bytes for each of 11 samples; "
        "set it to 3, or keep less per sample in Scoring.evaluate"
    )
    for result in score(world_size, fails="large", tried=1):
        assert re.sub(r"2000\d\d", "200007", result["numbers"]["error"]) == expected
        # the length of the stream is unknown
        assert result["stream"]["tried"]["eval/of/two/1"] == 2.5


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_too_much_is_refused_in_mid_evaluation_on_all_ranks_alike(score, world_size):
    for result in score(world_size, num_samples=200, fails="large"):
        for kind in ("numbers", "stream"):
            assert "trainer.max_gathered_mb=1: rank zero would get at least " in result[kind]["error"]
            assert int(result[kind]["error"].split("each of ")[1].split()[0]) < 200


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_error_on_rank_zero_is_every_ranks(score, world_size):
    zero, *others = score(world_size, fails="score")
    assert zero["numbers"]["error"] == "LookupError: no such class"
    for other in others:
        assert other["numbers"]["error"] == "OnRankZeroError: on rank zero: LookupError: no such class"
    # too few samples were tried: then it is no mistake
    for result in score(world_size, num_samples=20, fails="score", tried=1):
        assert result["numbers"] == result["stream"] == {"tried": {}}


@pytest.mark.nightly
@pytest.mark.parametrize(("world_size", "num_samples"), [(1, 23), (2, 23), (3, 23), (3, 2), (2, 1)])
def test_metrics_of_torchmetrics_are_those_of_one_rank(score, world_size, num_samples):
    pytest.importorskip("torchmetrics")
    from tests.multiprocess.programs.scoring import Scoring

    task = Scoring(with_torchmetrics=True)
    objects = task.build_metrics()
    task.evaluate(None, torch.arange(num_samples)[:, None].float())
    for result in score(world_size, num_samples, with_torchmetrics=True):
        for kind in ("numbers", "stream"):
            means = result[kind]["means"]
            assert result[kind]["same"]
            # from batches of one sample each, torchmetrics computes no correlation
            for name in ("auc", "binned", "above", "mean", "retrieval", *(["pearson"] if num_samples != 2 else [])):
                expected = objects[name].compute().item()
                if math.isnan(expected):
                    assert math.isnan(means[f"eval/{name}"])
                else:
                    assert means[f"eval/{name}"] == pytest.approx(expected, abs=1e-6)
            for name, value in objects["both"].compute().items():
                assert means[f"eval/both/{name}"] == pytest.approx(value.item(), abs=1e-6)
            for index, value in enumerate(objects["classes"].compute().tolist()):
                assert means[f"eval/classes/{index}"] == pytest.approx(value, abs=1e-6)


@pytest.mark.nightly
def test_an_auc_is_that_of_scikit_learn(score):
    pytest.importorskip("torchmetrics")
    from sklearn.metrics import roc_auc_score

    from tests.multiprocess.programs.scoring import scores_and_labels

    scores, labels = scores_and_labels(torch.arange(23.0))
    (result,) = score(1, 23, with_torchmetrics=True)
    assert result["numbers"]["means"]["eval/auc"] == pytest.approx(roc_auc_score(labels, scores))
