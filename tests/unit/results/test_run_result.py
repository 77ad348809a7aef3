from __future__ import annotations

from hpctrain.results.run_result import RunResult, read_results, varied_keys
from hpctrain.run.directory import RunDirectory
from hpctrain.status.runs import find_runs

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.003, "betas": [0.9, 0.999]}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}


def read(tmp_path) -> list[RunResult]:
    return read_results(find_runs(tmp_path / "sweep"))


def test_numbers_are_compared_by_value(tmp_path, make_run):
    for number, value in enumerate([1, 1.0, True, 2]):
        make_run(number, {"model": {"width": value, "same": [1, 2.0]}})
    keys = varied_keys(read(tmp_path))
    assert keys.names == ("model.width",)
    assert [keys.values(result)["model.width"] for result in read(tmp_path)] == [1, 1.0, True, 2]
    one = varied_keys(read(tmp_path)[:2])
    assert one.names == ()


def test_what_does_not_decide_the_weights_is_shown_only_if_the_sweep_varied_it(tmp_path, make_run):
    make_run(
        0, {"cluster": {"time_min": 5, "kind": "slurm"}, "trainer": {"max_steps": 5}}, varied={"cluster.kind": "slurm"}
    )
    make_run(
        1, {"cluster": {"time_min": 6, "kind": "local"}, "trainer": {"max_steps": 9}}, varied={"cluster.kind": "local"}
    )
    assert varied_keys(read(tmp_path)).names == ("cluster.kind", "trainer.max_steps")


def test_a_group_stands_for_the_keys_that_follow_from_its_option(tmp_path, make_run):
    for number, (option, values) in enumerate([("adamw", ADAMW), ("sgd", SGD)]):
        make_run(number, {"seed": 0, "optimizer": values}, varied={"seed": "0", "optimizer": option})
        make_run(number + 2, {"seed": 1, "optimizer": values}, varied={"seed": "1", "optimizer": option})
    keys = varied_keys(read(tmp_path))
    assert keys.names == ("optimizer", "seed")
    assert keys.values(read(tmp_path)[1]) == {"optimizer": "sgd", "seed": 0}
    # a resume with another value: it no longer follows from the option
    run = RunDirectory.at(tmp_path / "sweep" / "3")
    run.config.write_text(run.config.read_text().replace("lr: 0.1", "lr: 0.2"))
    assert varied_keys(read(tmp_path)).names == ("optimizer", "optimizer.lr", "seed")


def test_runs_of_several_commands(tmp_path, make_run):
    make_run(0, {"optimizer": ADAMW})
    make_run(1, {"optimizer": {**ADAMW, "lr": 0.01}}, varied={"optimizer.lr": "0.01"})
    make_run(2, {"optimizer": SGD}, varied={"optimizer": "sgd"})
    keys = varied_keys(read(tmp_path))
    assert keys.names == ("optimizer.lr", "optimizer._target_")
    assert keys.values(read(tmp_path)[0]) == {"optimizer.lr": 0.003, "optimizer._target_": "torch.optim.AdamW"}


def test_an_experiment_stands_for_all_that_follows_from_it(tmp_path, make_run):
    make_run(0, {"optimizer": ADAMW, "data": {"shuffle": True}}, varied={"experiment": "one"})
    make_run(1, {"optimizer": SGD, "data": {"shuffle": False}}, varied={"experiment": "two"})
    assert varied_keys(read(tmp_path)).names == ("experiment",)


def test_a_key_that_an_older_version_lacked_is_no_difference(tmp_path, make_run):
    make_run(0, {"trainer": {"compile": False}, "args": {"lr": 1}})
    make_run(1, {"trainer": {}, "args": {}})
    assert varied_keys(read(tmp_path)).names == ("args.lr",)
