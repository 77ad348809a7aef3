import pytest
from hydra.core.config_store import ConfigStore

from hpctrain.config.compose import Composer
from hpctrain.config.overrides import open_overrides
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer():
    return Composer()


def test_a_folder_of_the_users_comes_before_hpctrains_own(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "mine.yaml").write_text("defaults: [default, _self_]\nmax_epochs: 3\n")
    composer = Composer(str(tmp_path))
    assert {"default", "mine"} <= set(composer.options.of("trainer"))
    assert composer.compose(["trainer=mine"]).trainer.max_epochs == 3
    with pytest.raises(ConfigError, match=r"^--config-dir=\S+/nowhere: is not a folder"):
        Composer(str(tmp_path / "nowhere"))


def test_a_later_composer_of_the_process_needs_no_hydra_for_the_same_options(monkeypatch):
    config = Composer().compose(["optimizer=sgd", "seed=3"])
    monkeypatch.setattr(Composer, "_compose_uncached", None)
    assert Composer().compose(["optimizer=sgd", "seed=3"]) == config
    assert Composer().compose(["optimizer=sgd", "seed=4"]).seed == 4


def test_a_later_composer_sees_what_a_program_has_stored_in_hydra_meanwhile():
    try:
        for width in (7, 9):
            ConfigStore.instance().repo.get("model", {}).pop("stored.yaml", None)  # Hydra 1.4 warns of a replacement
            ConfigStore.instance().store(
                group="model",
                name="stored",
                node={"_target_": "hpctrain.models.mlp.MLP", "in_features": 64, "width": width},
            )
            assert Composer().compose(["model=stored"]).model["width"] == width
    finally:
        ConfigStore.instance().repo["model"].pop("stored.yaml", None)


def test_a_later_composer_reads_the_users_folder_again(tmp_path):
    option = tmp_path / "trainer" / "mine.yaml"
    option.parent.mkdir()
    for epochs in (3, 4):
        option.write_text(f"defaults: [default, _self_]\nmax_epochs: {epochs}\n")
        assert Composer(str(tmp_path)).compose(["trainer=mine"]).trainer.max_epochs == epochs


def test_options_are_those_that_can_be_chosen(composer):
    assert composer.options.of("cluster") == ["local", "slurm"]


def test_callbacks_are_chosen_as_a_list_and_keep_its_order(composer, tmp_path):
    assert composer.compose([]).callbacks == {}
    chosen = composer.compose(["callbacks=[log_weights,early_stopping]", "callbacks.early_stopping.patience=3"])
    assert list(chosen.callbacks) == ["log_weights", "early_stopping"]
    assert chosen.callbacks["early_stopping"]["patience"] == 3
    assert list(composer.compose(["callbacks=early_stopping"]).callbacks) == ["early_stopping"]
    assert composer.compose(["callbacks=[]"]).callbacks == {}
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "mine.yaml").write_text("mine: {_target_: hpctrain.callbacks.Callback}")
    own = Composer(str(tmp_path)).compose(["callbacks=[mine,log_text]"])
    assert list(own.callbacks) == ["mine", "log_text"]


def test_files_of_one_entry_cant_be_chosen_together(tmp_path):
    (tmp_path / "callbacks").mkdir()
    for name in ("soft", "strict"):
        (tmp_path / "callbacks" / f"{name}.yaml").write_text("mine: {_target_: hpctrain.callbacks.Callback}")
    (tmp_path / "callbacks" / "patient.yaml").write_text(
        "defaults: [early_stopping, _self_]\nearly_stopping: {patience: 9}"
    )
    own = Composer(str(tmp_path))
    assert list(own.compose(["callbacks=[strict]"]).callbacks) == ["mine"]
    assert own.compose(["callbacks=[patient,soft]"]).callbacks["early_stopping"]["patience"] == 9
    with pytest.raises(ConfigError) as caught:
        own.compose(["callbacks=[soft,early_stopping,strict]"])
    assert str(caught.value) == (
        "callbacks=[soft,early_stopping,strict]: soft and strict both have the entry mine, and only one would count; "
        "rename the entry in one of them"
    )


def test_files_that_name_their_package_may_be_chosen_together(tmp_path):
    (tmp_path / "callbacks").mkdir()
    for name, entry in {"a": "first", "b": "second", "again": "first"}.items():
        text = f"# @package _global_\ncallbacks: {{{entry}: {{_target_: hpctrain.callbacks.Callback}}}}"
        (tmp_path / "callbacks" / f"{name}.yaml").write_text(text)
    inner = "# @package callbacks.{}\n_target_: hpctrain.callbacks.Callback"
    (tmp_path / "callbacks" / "third.yaml").write_text(inner.format("third"))
    (tmp_path / "callbacks" / "fourth.yaml").write_text(inner.format("fourth"))
    own = Composer(str(tmp_path))
    assert sorted(own.compose(["callbacks=[a,b,third,fourth]"]).callbacks) == ["first", "fourth", "second", "third"]
    with pytest.raises(ConfigError, match="a and again both have the entry first"):
        own.compose(["callbacks=[a,b,again]"])


def test_names_that_the_user_chooses_need_no_plus_sign(composer):
    words = ["cluster.env.COLOUR=green", "cluster.sbatch.comment=mine", "cluster.environ=1", "+cluster.env.A=b"]
    assert open_overrides(words) == [f"++{words[0]}", f"++{words[1]}", *words[2:]]
    config = composer.compose(["cluster=slurm", *words[:2]])
    assert config.cluster.env == {"COLOUR": "green"}
    assert config.cluster.sbatch == {"comment": "mine"}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "digits"),
        (["task=custom", "task._target_=hpctrain.tasks.text.Text"], "text"),
        (["name=mine"], "mine"),
    ],
)
def test_a_run_is_named_after_its_task(composer, words, name):
    assert composer.compose(words).name == name


def test_a_word_that_is_not_an_override(composer):
    assert [one.key_or_group for one in composer.parse(["seed=1", "cluster=slurm"])] == ["seed", "cluster"]
    with pytest.raises(ConfigError, match=r"seed==\["):
        composer.parse(["seed==["])


def test_data_is_refused_before_it_is_parsed(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "huge.yaml").write_text("x: " + "1" * 2_000_000)
    composer = Composer(str(tmp_path))
    remedy = "got 2 MB; write data into a file of its own"
    with pytest.raises(ConfigError, match=rf"^name=aaaaaaaaaaaaaaaaaaaa\.\.\.: expected at most 1 MB, {remedy}"):
        composer.compose(["name=" + "a" * 2_000_000])
    with pytest.raises(ConfigError, match=rf"^task=huge: expected at most 1 MB, {remedy}"):
        composer.compose(["task=huge"])
