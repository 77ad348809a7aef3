from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.retention import Retention
from hpctrain.run.checkpoints import CheckpointInfo
from hpctrain.run.score import Score


def info(step, *, intact=True, ours=True, score=None):
    return CheckpointInfo(
        step=step,
        path=Path(f"step_{step:08d}"),
        intact=intact and ours,
        problem="" if intact and ours else "damaged",
        bytes=1,
        weights_digest="d" if ours else None,
        score=None if score is None else Score("accuracy", "max", score),
    )


@st.composite
def findings(draw):
    steps = draw(st.lists(st.integers(0, 60), unique=True, max_size=12))
    return [
        info(
            step,
            intact=draw(st.booleans()),
            ours=draw(st.integers(0, 4)) > 0,
            score=draw(st.none() | st.sampled_from([0.1, 0.5, 0.9])),
        )
        for step in steps
    ]


@settings(deadline=None)
@given(findings(), st.integers(0, 5), st.none() | st.integers(1, 20), st.integers(0, 4))
def test_what_every_policy_must_hold(found, keep, keep_every, keep_best):
    policy = Retention(keep=keep, keep_every=keep_every, keep_best=keep_best)
    removed = policy.steps_to_remove(found)
    by_step = {item.step: item for item in found}
    intact = sorted(item.step for item in found if item.intact)
    left = [step for step in intact if step not in removed]
    assert removed == sorted(set(removed) & set(by_step))
    assert set(intact[-2:]) <= set(left)
    assert set(intact[len(intact) - min(keep, len(intact)) :]) <= set(left)
    assert all(by_step[step].weights_digest is not None for step in removed)
    if keep_every:
        assert not [step for step in removed if step % keep_every == 0 and by_step[step].intact]
        left = [step for step in left if step % keep_every]
    judged = sorted((-by_step[step].score.value, step) for step in intact if by_step[step].score)
    best = {step for _, step in judged[:keep_best]}
    assert not best & set(removed)
    assert len(set(left) - best) <= max(keep, 2)
    assert policy.steps_to_remove([item for item in found if item.step not in removed]) == []


@pytest.mark.parametrize(
    ("found", "keep", "keep_every", "removed"),
    [
        ([], 3, None, []),
        ([info(1), info(2), info(3)], 2, None, [1]),
        ([info(3), info(1), info(2)], 1, None, [1]),
        ([info(1), info(2), info(3), info(4)], 3, 1, []),
        ([info(10), info(15), info(20), info(25), info(30)], 2, 20, [10, 15]),
        ([info(1), info(2, intact=False), info(3)], 2, None, []),
        ([info(1), info(2), info(3, intact=False)], 2, None, []),
        ([info(1, intact=False), info(2), info(3)], 9, None, [1]),
        ([info(1, ours=False), info(2), info(3)], 2, None, []),
    ],
)
def test_examples(found, keep, keep_every, removed):
    assert Retention(keep=keep, keep_every=keep_every).steps_to_remove(found) == removed


@pytest.mark.parametrize(
    ("scores", "keep_best", "removed"),
    [
        ([0.9, 0.5, 0.7, 0.6], 1, [2]),
        ([0.9, 0.5, 0.7, 0.6], 0, [1, 2]),
        ([0.5, 0.5, 0.4, 0.4], 1, [2]),  # of equal ones the earlier
        ([None, 0.1, None, None], 1, [1]),
        ([0.9, 0.8, None, None], 3, []),
    ],
)
def test_the_best_stay(scores, keep_best, removed):
    found = [info(step, score=score) for step, score in enumerate(scores, 1)]
    assert Retention(keep_best=keep_best).steps_to_remove(found) == removed


def test_a_damaged_one_is_none_of_the_best():
    found = [info(1, score=0.8), info(2, score=0.9, intact=False), info(3), info(4)]
    assert Retention(keep_best=1).steps_to_remove(found) == [2]
