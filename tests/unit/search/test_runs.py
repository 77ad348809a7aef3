from __future__ import annotations

import pytest

import hpctrain.search.runs as module
from hpctrain.config.compose import ProgramComposer
from hpctrain.config.root import flat
from hpctrain.config.stored import load
from hpctrain.launch.existing_run import stored_values
from hpctrain.launch.prepare import prepare
from hpctrain.run.directory import RunDirectory
from hpctrain.search.runs import SweepRun, _values, place


@pytest.mark.parametrize("line", ["seed: [", "absent: 1"])
def test_the_number_of_a_run_that_cant_be_read_is_taken(many, composer, capsys, line):
    many[0].config.write_text(f"{many[0].config.read_text()}{line}\n")
    runs = [SweepRun(composer.compose([f"seed={n}"]), {"seed": str(n)}) for n in (0, 1, 7)]
    placed = place(runs, RunDirectory.at("many"))
    assert [run.directory.path.name for run in placed] == ["3", "1", "4"]
    err = capsys.readouterr().err
    assert err.startswith("hpctrain: warning: many/0: ")
    assert err.count("\n") == 1


def test_texts_tell_equal_numbers_of_a_program_apart(tmp_path):
    composer, home = ProgramComposer(["true"]), RunDirectory.at(tmp_path)

    def placed(*texts):
        runs = [SweepRun(composer.compose_run([f"args.v={text}"]), {"args.v": text}) for text in texts]
        placed = place(runs, home)
        for run in placed:
            prepare(run.config, [], run.varied)
        return [run.directory.path.name for run in placed]

    assert placed("1.1", "1.10", "2") == ["0", "1", "2"]
    assert placed("1.10", "1.1") == ["1", "0"]
    assert placed("2.0", "3") == ["2", "3"]


def test_a_sweep_reads_each_of_its_runs_once(many, composer, monkeypatch):
    read, loaded = [], []
    monkeypatch.setattr(module, "stored_values", lambda path: read.append(path.parent.name) or stored_values(path))
    monkeypatch.setattr(module, "load_run", lambda path: loaded.append(path.parent.name) or load(path))
    for seed in (7, 8, 2):
        (placed,) = place([SweepRun(composer.compose([f"seed={seed}"]), {"seed": str(seed)})], RunDirectory.at("many"))
        prepare(placed.config, [])
    assert sorted(read) == ["0", "1", "2", "3", "4"]
    assert loaded == ["2"]  # to check the one that continues


def test_a_run_whose_configuration_changed_is_read_again(many, composer):
    for steps in (5, 6):
        config = composer.compose(["seed=1", f"trainer.max_steps={steps}"])
        (placed,) = place([SweepRun(config)], RunDirectory.at("many"))
        prepare(placed.config, [])
        assert _values(many[1])["trainer.max_steps"] == steps


@pytest.mark.parametrize("words", [["optimizer.lr=1e-5"], ["cluster=slurm", "optimizer=sgd", "model=convnet"]])
def test_the_values_of_a_file_are_those_that_load_gives(composer, tmp_path, words):
    directory = prepare(composer.compose([*words, f"run_dir={tmp_path / 'run'}"]), []).directory
    assert repr(sorted(stored_values(directory.config).items())) == repr(sorted(flat(load(directory.config)).items()))


def test_a_run_of_an_earlier_version_or_edited_by_hand_is_the_same_run(many, composer):
    config = composer.compose(["seed=1", "trainer.clip_grad_norm=1.0"])
    text = prepare(composer.compose(["run_dir=many/3", "seed=1", "trainer.clip_grad_norm=1.0"]), []).directory.config
    lines = [line for line in text.read_text().splitlines() if "channels_last" not in line]
    text.write_text("\n".join(lines).replace("clip_grad_norm: 1.0", "clip_grad_norm: 1"))
    (placed,) = place([SweepRun(config)], RunDirectory.at("many"))
    assert placed.directory.path.name == "3"
