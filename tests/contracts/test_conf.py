"""Every file of conf/ composes, mirrors the schema, and has an owner."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import hpctrain.config
from hpctrain.config.compose import Composer, ProgramComposer, SweepComposer
from hpctrain.config.paths import conf_dir
from hpctrain.config.root import GROUPS, Config, ProgramConfig, RunConfig
from hpctrain.config.stored import load_run, to_yaml
from hpctrain.config.sweep import kind_of
from tests.contracts.configuration_reference import reference

OPTIONS = sorted(
    (path.parent.name, path.stem) for path in conf_dir().glob("*/*.yaml") if path.parent.parent == conf_dir()
)
ONLY_OPTIONS = [each for each in OPTIONS if each[1] == "default" and each[0] not in ("run", "sweep")]
"""Those of groups in which nothing can be chosen: no combination of them is another configuration."""
OF_EACH_RUN = {"nodes", "name", "run_dir", "run_mode", "after", "after_failure"}
TOP_LEVEL = {*OF_EACH_RUN, "seed", "init_from", "init_match", "init_strict"}


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize(
    ("group", "option"), [each for each in OPTIONS if each not in ONLY_OPTIONS], ids=lambda value: value
)
def test_every_option_composes(group, option, composer, needed, tmp_path):
    if group == "sweep":
        assert kind_of(SweepComposer().compose_sweep([f"sweep={option}"])) == option
        return
    if group == "run":
        composer = ProgramComposer(["true"])
    composes(composer, [f"{group}={option}", *needed.get(f"{group}={option}", [])], tmp_path)


def test_the_groups_with_one_option_compose(composer, tmp_path):
    assert len(ONLY_OPTIONS) > 3
    composes(composer, [f"{group}={option}" for group, option in ONLY_OPTIONS], tmp_path)


def composes(composer, words, tmp_path):
    config = composer.compose_run(words)
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(config))
    assert load_run(stored) == config


def test_every_group_is_a_module_and_a_folder():
    modules = {path.stem for path in Path(hpctrain.config.__file__).parent.glob("*.py")}
    folders = {path.name for path in conf_dir().iterdir() if path.is_dir()} - {"hydra", "experiment"}
    assert folders == set(GROUPS)
    assert folders <= modules


def test_the_groups_are_the_fields():
    fields = {field.name for field in dataclasses.fields(Config)}
    assert (set(GROUPS) | TOP_LEVEL) - {"run", "sweep"} == fields
    program = {field.name for field in dataclasses.fields(ProgramConfig)}
    groups = {"cluster", "code", "health", "notify", "resume", "run"}
    assert program == {*OF_EACH_RUN, "args"} | groups
    assert program - fields == {"run", "args"}


def schemas():
    yield RunConfig
    yield Config
    yield ProgramConfig
    for group in GROUPS.values():
        yield from group.values()


@pytest.mark.parametrize("schema_class", list(schemas()), ids=lambda found: found.__name__)
def test_every_key_has_a_type_a_default_and_a_docstring(schema_class):
    tree = ast.parse(inspect.getsource(schema_class)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            assert node.value is not None, ast.unparse(node)
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert documented, f"{schema_class.__name__}.{ast.unparse(node.target)} has no docstring"


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_every_group_names_its_owner(group):
    module = inspect.getmodule(next(iter(GROUPS[group].values())))
    assert re.search(r"Owner: hpctrain\.\w+", module.__doc__ or ""), module


def test_a_users_own_cluster_builds_on_slurm(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mysite.yaml").write_text(
        "defaults:\n  - slurm\n  - _self_\n\npartition: gpu\nsetup:\n  - module load cuda\nenv:\n  A: b\n"
        "sbatch:\n  licenses: matlab\n"
    )
    config = Composer(str(tmp_path)).compose(["cluster=mysite", "nodes=2", "cluster.env.C=d"])
    assert config.cluster.kind == "slurm"
    assert config.cluster.partition == "gpu"
    assert config.cluster.env == {"A": "b", "C": "d"}
    assert config.cluster.sbatch == {"licenses": "matlab"}


def test_the_name_is_the_tasks(composer):
    assert composer.compose([]).name == "digits"
    assert composer.compose(["task=text"]).name == "text"
    assert composer.compose(["task=text", "name=mine"]).name == "mine"
    assert composer.compose(["task=custom", "task._target_=hpctrain.tasks.text.Text", "model=gpt"]).name == "text"


def test_a_sweep_over_values_is_what_single_compositions_are(composer):
    fresh = Composer()
    for overrides in (["optimizer.lr=0.1"], ["optimizer.lr=0.2", "nodes=1"], ["optimizer=sgd"], ["optimizer.lr=0.1"]):
        assert composer.compose(overrides) == Composer().compose(overrides)
    assert fresh.compose([]) == composer.compose([])


def test_the_reference_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
    command = "python tests/contracts/configuration_reference.py > docs/reference/configuration.md"
    assert page.read_text() == reference(), f"run: {command}"
