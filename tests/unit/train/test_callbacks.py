from __future__ import annotations

import inspect
import itertools
import logging
import os
import threading
import time

import pytest

from hpctrain.callbacks import Callback
from hpctrain.config.task_checks import CALLBACK, HOOKS
from hpctrain.errors import ConfigError, TaskError
from hpctrain.files import read_json_lines
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.train.callbacks import build_callbacks
from hpctrain.train.profiling.profiler import Profiler
from hpctrain.train.training_log import TrainingLog
from tests.unit.train import small_callbacks
from tests.unit.train.small_task import Small

RECORDER = "+callbacks.seen._target_=tests.unit.train.small_callbacks.Recorder"


@pytest.fixture
def calls():
    small_callbacks.Recorder.calls.clear()
    return small_callbacks.Recorder.calls


def digests(directory):
    return {info.step: info.weights_digest for info in list_checkpoints(directory)}


def records(directory, *names):
    return [
        (record["step"], record[name])
        for record in read_json_lines(directory.metrics)
        for name in names
        if name in record
    ]


def test_the_login_half_knows_the_base_class_and_its_hooks():
    for hook in HOOKS:
        arguments = tuple(inspect.signature(getattr(Callback, hook)).parameters)[1:]
        assert arguments == HOOKS[hook]
    own = [name for name in vars(Callback) if not name.startswith("_")]
    assert own == [*HOOKS, "state_dict", "load_state_dict"]
    assert f"{Callback.__module__}.{Callback.__name__}" == CALLBACK


def test_without_callbacks_nothing_is_called():
    callbacks = build_callbacks({})
    assert not any(callbacks.hooks.values())


def test_a_hook_that_isnt_overridden_isnt_called():
    callbacks = build_callbacks({"failing": {"_target_": "tests.unit.train.small_callbacks.Failing"}})
    assert [hook for hook in HOOKS if callbacks.hooks[hook]] == ["after_step"]


def test_a_hook_that_the_constructor_sets_is_called():
    (hook,) = build_callbacks({"late": {"_target_": "tests.unit.train.small_callbacks.SetLater"}}).hooks["after_step"]
    assert hook.call.__name__ == "_count"


def test_hooks_are_called_around_the_steps(attempt, calls):
    assert attempt(RECORDER, "trainer.max_steps=5").run()
    each = [[("before_step", n), ("after_backward", n), ("after_step", n + 1)] for n in range(5)]
    first = [("on_start", 0), *itertools.chain(*each[:4]), ("after_evaluation", 4), ("after_save", 4)]
    last = [("after_evaluation", 5), ("after_save", 5), ("on_end", 5)]
    assert calls == [*first, *each[4], *last]


def test_a_save_that_is_left_out_calls_no_hook(attempt, calls, monkeypatch):
    fsync = os.fsync

    def write_until_step_3(descriptor):
        while threading.current_thread() is not threading.main_thread() and ("after_step", 3) not in calls:
            time.sleep(0.001)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", write_until_step_3)
    assert attempt(RECORDER, "checkpoint.every_steps=1", "trainer.max_steps=4").run()
    saved = [step for name, step in calls if name == "after_save"]
    assert (saved[0], saved[-1]) == (1, 4)
    assert 2 not in saved


def test_what_callbacks_log_belongs_to_the_step(attempt, directory, calls):
    assert attempt(RECORDER, "trainer.max_steps=7").run()
    assert records(directory, "train/steps") == [(3, 2.0), (6, 5.0), (7, 7.0)]
    assert records(directory, "eval/steps") == [(4, 4.0), (7, 7.0)]


def test_a_stop_is_told_and_the_state_restored(attempt, directory, calls):
    stopped = attempt(RECORDER, "+task.signal_in=loss", "+task.signal_at=5")
    assert not stopped.run()
    assert calls[-2:] == [("after_save", 3), ("on_stop", 3)]
    del calls[:]
    assert attempt(RECORDER).run()
    assert calls[0] == ("on_start", 3)
    assert records(directory, "train/steps")[-1] == (10, 10.0)


@pytest.mark.parametrize(("word", "step"), [("end_after=5", 5), ("end_at=4", 4)])
def test_a_callback_ends_the_run(attempt, directory, calls, word, step, caplog):
    caplog.set_level(logging.INFO)
    trainer = attempt(RECORDER, f"+callbacks.seen.{word}")
    assert trainer.run()
    assert trainer.step == step
    assert trainer.why_ended.startswith("seen: ")
    assert calls[-2:] == [("after_save", step), ("on_end", step)]
    # once, also if that evaluation ended the run
    assert calls.count(("after_evaluation", step)) == 1
    assert records(directory, "eval/loss")[-1][0] == step
    assert records(directory, "train/loss")[-1][0] == step
    before = digests(directory)

    again = attempt(RECORDER, f"+callbacks.seen.{word}")
    assert again.run()
    assert (again.step, again.why_ended) == (step, trainer.why_ended)
    assert digests(directory) == before
    assert "to train further: python -m hpctrain resume" in caplog.text


def test_a_run_that_ended_continues_once_its_callbacks_change(attempt, directory, calls):
    assert attempt(RECORDER, "+callbacks.seen.end_after=5").run()
    later = attempt(RECORDER, "+callbacks.seen.end_after=7")
    assert later.run()
    assert later.step == 7
    without = attempt()
    assert without.run()
    assert (without.step, without.why_ended) == (10, "")


def test_a_stop_between_a_decision_and_its_end_changes_nothing(attempt, directory, calls):
    words = (RECORDER, "+callbacks.seen.end_at=4", "trainer.sanity_batches=0")
    stopped = attempt(*words, "+task.signal_in=evaluate", "+task.signal_at=1")
    assert not stopped.run()
    assert stopped.step == 4
    finished = attempt(*words)
    assert finished.run()
    assert (finished.step, finished.why_ended) == (4, "seen: seen ['loss']")
    assert [call for call in calls if call[0] == "after_evaluation"] == [("after_evaluation", 4)]
    assert [step for step, _ in records(directory, "eval/loss")] == [4]


def test_a_stop_in_the_last_evaluation_of_an_early_end_doubles_no_record(attempt, directory, calls):
    words = (RECORDER, "+callbacks.seen.end_after=5", "trainer.sanity_batches=0")
    stopped = attempt(*words, "+task.signal_in=evaluate", "+task.signal_at=3")
    assert not stopped.run()
    assert stopped.step == 5
    assert attempt(*words).run()
    assert [step for step, _ in records(directory, "train/loss")] == [3, 5]
    assert [step for step, _ in records(directory, "eval/loss")] == [4, 5]


def test_a_pass_of_a_callback_leaves_no_trace(attempt, directory, tmp_path):
    assert attempt("trainer.ema_decay=0.5").run()
    straight = digests(directory)
    directory.path.rename(tmp_path / "straight")
    directory.create(0o750)
    assert attempt("trainer.ema_decay=0.5", "+callbacks.draw._target_=tests.unit.train.small_callbacks.Drawing").run()
    assert digests(directory) == straight


@pytest.mark.parametrize(
    ("hook", "method"),
    [
        ("on_start", "scalar"),
        ("after_save", "scalar"),
        ("after_save", "text"),
        ("on_stop", "scalar"),
        ("on_end", "text"),
    ],
)
def test_logging_outside_of_the_steps_is_refused(attempt, directory, hook, method):
    words = ("+callbacks.talking._target_=tests.unit.train.small_callbacks.Talking", f"+callbacks.talking.hook={hook}")
    signal = ("+task.signal_in=loss", "+task.signal_at=5") if hook == "on_stop" else ()
    trainer = attempt(*words, f"+callbacks.talking.method={method}", "trainer.max_steps=5", *signal)
    with pytest.raises(TaskError) as caught:
        trainer.run()
    assert str(caught.value) == (
        f"log.{method}('mine') was called in {hook} of callbacks.talking, which belongs to no step: "
        "log in before_step, after_backward, after_step or after_evaluation"
    )


def test_a_callback_that_evaluates_leaves_what_others_log(attempt, directory):
    words = (
        "+callbacks.seeing._target_=tests.unit.train.small_callbacks.Seeing",
        "+callbacks.draw._target_=tests.unit.train.small_callbacks.Drawing",
    )
    assert attempt(*words, "trainer.max_steps=4").run()
    assert records(directory, "eval/mine") == [(4, 1.0)]


def naming(entry, name, *words):
    target = f"+callbacks.{entry}._target_=tests.unit.train.small_callbacks.Naming"
    return (target, f"+callbacks.{entry}.name={name}", *(f"+callbacks.{entry}.{word}" for word in words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (naming("a", "returned"), "Small logs 'train/returned', as callbacks.a does"),
        (naming("a", "logged"), "Small logs 'train/logged', as callbacks.a does"),
        ((*naming("a", "x"), *naming("b", "x")), "callbacks.b logs 'train/x', as callbacks.a does"),
        (naming("a", "loss", "hook=after_evaluation"), "callbacks.a logs 'eval/loss', as Small does"),
    ],
)
def test_two_sources_of_one_name_are_refused(attempt, monkeypatch, words, said):
    plain = Small.loss

    def loss(task, model, batch):
        task.log.scalar("logged", 3.0)
        return {"loss": plain(task, model, batch), "returned": 3.0}

    monkeypatch.setattr(Small, "loss", loss)
    with pytest.raises(TaskError) as caught:
        # with a record per step, the meter is empty whenever a callback logs
        attempt(*words, "logger.every_steps=1").run()
    assert str(caught.value) == f"{said}: choose another name for one of them"


def test_two_callbacks_log_different_names(attempt, directory):
    assert attempt(*naming("a", "x"), *naming("b", "y"), "trainer.max_steps=3").run()
    assert records(directory, "train/x", "train/y") == [(3, 1.0), (3, 1.0)]


def test_a_mistake_in_what_a_callback_logs_names_the_callback(attempt):
    with pytest.raises(TaskError, match=r"^callbacks\.a\.log\.scalar: expected a number or a scalar tensor as 'v'"):
        attempt(*naming("a", "v", "value=words")).run()


def test_an_error_in_a_callback_passes_through(attempt):
    with pytest.raises(ValueError, match="a mistake in a callback"):
        attempt("+callbacks.bad._target_=tests.unit.train.small_callbacks.Failing").run()


def test_an_error_at_the_end_loses_nothing_and_a_resume_calls_the_hook_again(attempt, directory, calls, monkeypatch):
    monkeypatch.setattr(TrainingLog, "complete", lambda log: calls.append(("complete", 0)))
    monkeypatch.setattr(Profiler, "finish", lambda profiler, step: calls.append(("finish", step)))
    with pytest.raises(ValueError, match="a mistake at the end"):
        attempt("+callbacks.bad._target_=tests.unit.train.small_callbacks.FailingAtTheEnd").run()
    assert calls == [("finish", 10), ("complete", 0)]
    before, metrics = digests(directory), directory.metrics.read_bytes()
    assert attempt(RECORDER).run()
    assert calls[-1] == ("on_end", 10)
    assert not any(hook == "before_step" for hook, _ in calls)
    assert (digests(directory), directory.metrics.read_bytes()) == (before, metrics)


def test_a_state_that_cant_be_saved_is_refused_before_the_first_step(attempt):
    with pytest.raises(TaskError, match=r"callbacks\.bad: Unsaveable\.state_dict\(\)\['file'\] is a .*object"):
        attempt("+callbacks.bad._target_=tests.unit.train.small_callbacks.Unsaveable").run()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("make", "is not a subclass of hpctrain.callbacks.Callback"),
        ("Other", "is not a subclass of hpctrain.callbacks.Callback"),
        ("Misspelt", "has on_epoch_end, which is not a hook and would never be called; did you mean on_end?"),
        ("Inherited", "has on_epoch_end"),
        ("Short", "its after_evaluation can't be called.*write def after_evaluation"),
        ("Close", "has aftr_step, which is not a hook and would never be called; did you mean after_step?"),
        ("Forgetful", "has state_dict and not load_state_dict, so a resume would lose the state; define load_state_d"),
        ("Async", "its after_step is a coroutine, so calling it would run nothing; write a plain def after_step"),
        ("Yielding", "its after_step is a generator, so calling it would run nothing"),
    ],
)
def test_what_is_no_callback_is_refused(target, said):
    with pytest.raises(ConfigError, match=said) as caught:
        build_callbacks({"mine": {"_target_": f"tests.unit.train.small_callbacks.{target}"}})
    assert caught.value.key == "callbacks.mine._target_"


@pytest.mark.parametrize("target", ["Other", "Misspelt", "Inherited", "Short", "Close", "Forgetful", "Async"])
def test_the_source_shows_it_before_anything_runs(compose_small, target):
    with pytest.raises(ConfigError, match=r"^callbacks\.mine\._target_="):
        compose_small(f"+callbacks.mine._target_=tests.unit.train.small_callbacks.{target}")


def test_time_ends_a_run_over_its_attempts(attempt, directory):
    first = attempt("trainer.max_time_min=1e-9")
    assert first.run()
    assert first.step == 1
    assert first.why_ended.startswith("trainer.max_time_min=1e-09: the run has trained for ")
    again = attempt("trainer.max_time_min=1e-9")
    assert again.run()
    assert (again.step, list(digests(directory))) == (1, [1])
    raised = attempt("trainer.max_time_min=60")
    assert raised.run()
    assert (raised.step, raised.why_ended) == (10, "")


def test_training_time_is_that_of_the_checkpoints(lone_world, compose_small):
    from hpctrain.train.stopping import EarlyEnd

    now = [0.0]
    config = compose_small("trainer.max_time_min=1")
    first = EarlyEnd(config, lone_world, clock=lambda: now[0])
    first.begin()
    now[0] = 40.0
    saved = first.state()
    now[0] = 55.0  # lost with the attempt
    second = EarlyEnd(config, lone_world, clock=lambda: now[0])
    second.load_state(saved)
    second.begin()
    now[0] = 70.0
    second.check_max_time()
    assert not second.requested
    now[0] = 75.0
    second.check_max_time()
    assert second.agree()


def test_a_signal_counts_more_than_an_end(attempt, calls):
    words = ("+callbacks.seen._target_=tests.unit.train.small_callbacks.Interrupted", "+callbacks.seen.end_after=2")
    stopped = attempt(*words)
    assert not stopped.run()
    assert stopped.step == 2
    finished = attempt(*words)
    assert finished.run()
    assert (finished.step, finished.why_ended) == (2, "seen: that is enough")
