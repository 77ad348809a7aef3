"""Every held-out sample is evaluated exactly once, by however many ranks."""

from __future__ import annotations

import math
import signal

import pytest

from hpctrain.rank.stop_request import StopKind


@pytest.fixture
def evaluate(ranks):
    def run(world_size, num_samples, micro_batch_size, *, workers=0, signal_at=None, kind="Numbers", tried=0):
        signals = [(signal_at or {}).get(rank, 0) for rank in range(world_size)]
        arguments = num_samples, micro_batch_size, workers, signals, kind, tried
        done = ranks("evaluating:be_rank", *arguments, world_size=world_size)
        assert all(process.code == 0 for process in done), "\n".join(process.output for process in done)
        return [process.result for process in done]

    return run


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("num_samples", "micro_batch_size"), [(1, 4), (2, 1), (7, 2), (12, 4), (13, 3)])
def test_every_sample_once_at_any_world_size(evaluate, world_size, num_samples, micro_batch_size):
    results = evaluate(world_size, num_samples, micro_batch_size)
    assert sorted(number for result in results for number in result["seen"]) == list(range(num_samples))
    (mean,) = {tuple(sorted(result["means"].items())) for result in results}
    # each sample has a bit of its own
    assert dict(mean)["eval/power"] * num_samples == pytest.approx(2**num_samples - 1, rel=1e-12)
    # the running mean is rank zero's, 0, on every rank; the variance is 1
    expected = sum(range(num_samples)) / num_samples / math.sqrt(1 + 1e-5)
    assert dict(mean)["eval/normed"] == pytest.approx(expected, rel=1e-6)
    assert {result["mean"] for result in results} == {0.0}


@pytest.mark.parametrize(("num_samples", "workers"), [(13, 0), (14, 1)])
def test_a_stream_without_a_length_has_every_sample_once_and_as_many_agreements_on_every_rank(
    evaluate, num_samples, workers
):
    results = evaluate(3, num_samples, 2, workers=workers, kind="Stream")
    assert sorted(number for result in results for number in result["seen"]) == list(range(num_samples))
    assert {result["num_batches"] for result in results} == {3}
    assert results[0]["means"] == results[1]["means"] == results[2]["means"]


@pytest.mark.parametrize(
    ("kind", "num_samples", "tried", "problem"),
    [
        ("Endless", 11, 0, "11 samples on rank 0 and more on rank 2"),
        ("Split", 8, 0, "8 samples on rank 0 and 10 on rank 2"),
        ("Split", 3, 4, "3 samples on rank 0 and 5 on rank 2"),
        ("SplitWithLength", 11, 1, "11 samples on rank 0 and 13 on rank 2"),
    ],
)
def test_a_stream_that_splits_itself_by_rank_is_refused(evaluate, kind, num_samples, tried, problem):
    for result in evaluate(3, num_samples, 2, kind=kind, tried=tried):
        assert (
            f"Count.eval_dataset: expected the same samples on every rank, found {problem}; return" in result["error"]
        )


def test_all_ranks_stop_after_the_same_batch_of_those_that_are_tried_out(evaluate):
    """Rank zero has one batch less than are tried, and rank one is asked to stop in its first."""
    results = evaluate(2, 9, 2, signal_at={1: 2}, tried=3)
    assert [result["stop"] for result in results] == [[StopKind.SIGNAL, signal.SIGUSR2]] * 2
    assert [result["num_batches"] for result in results] == [1, 1]
    assert all(result["same_random_state"] for result in results)


def test_ranks_without_a_sample_take_part(evaluate):
    results = evaluate(3, 1, 4)
    assert sorted(len(result["seen"]) for result in results) == [0, 0, 1]
    assert results[0]["means"] == results[1]["means"] == results[2]["means"]
    assert results[0]["means"].keys() == {"eval/power", "eval/normed"}


def test_the_model_evaluates_without_gradients_and_trains_on_afterwards(evaluate):
    for result in evaluate(2, 5, 2, workers=2):
        assert result["modes"] == [[False, False]]
        assert result["training"]


def test_a_stop_is_agreed_upon_in_mid_evaluation_and_leaves_no_trace(evaluate):
    """The ranks have different numbers of batches: those that are done do not wait for one that stopped."""
    for world_size in (1, 2, 3):
        results = evaluate(world_size, 40 * world_size + 1, 2, signal_at={world_size - 1: 2})
        assert [result["stop"] for result in results] == [[StopKind.SIGNAL, signal.SIGUSR2]] * world_size
        assert all(result["same_random_state"] for result in results)
        assert all(result["training"] for result in results)
        assert all(len(result["seen"]) < 40 for result in results)
        assert len({result["num_batches"] for result in results}) == 1


def test_a_request_to_stop_that_comes_too_late_waits_for_the_loop(evaluate):
    results = evaluate(2, 4, 2, signal_at={1: 2})
    assert [result["means"].keys() for result in results] == [{"eval/power", "eval/normed"}] * 2
