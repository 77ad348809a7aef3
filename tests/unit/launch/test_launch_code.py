"""The code of launches and resumes: which copy a run is made with, and what is left after an error."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess

import pytest

from hpctrain.attempt.unrecorded import UnrecordedEnds
from hpctrain.cli import main
from hpctrain.config.compose import ProgramComposer
from hpctrain.config.root import ProgramConfig
from hpctrain.config.run import ProgramRun
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.launch.existing_run import changed_config
from hpctrain.launch.launch_code import LaunchCode, needs_code, require_original_folder
from hpctrain.launch.launcher import prepare_launch
from hpctrain.launch.local import launch_local
from hpctrain.launch.prepare import plan, prepare, rollback_on_error
from hpctrain.run.code import code_for_attempt, current_code
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.scheduler.slurm import Slurm
from hpctrain.search.runs import SweepRun
from hpctrain.search.sweep import Sweep

SECRETS = (
    ".env: not copied with the code, since such names are usual for passwords and keys; the run finds the originals "
    "through links. To copy one: code.include=[.env]"
)
OWN = ["task=custom", "task._target_=my_task.Mine", "model=mlp"]
TASK = """
from hpctrain.tasks.digits import Digits


class Mine(Digits):
    def __init__(self, size=1):
        super().__init__()
"""


@pytest.fixture
def project(folder):
    """A repository with a task of one's own, in which commands are typed."""
    subprocess.run(["git", "init", "-q", "."], check=True)
    (folder / "my_task.py").write_text(TASK)
    (folder / ".gitignore").write_text("runs/\nR*/\n")
    return folder


@pytest.fixture
def prepared(composer):
    """Prepares a run, or opens it again."""

    def make(*words, **options):
        config = composer.compose(["run_dir=R", *words])
        directory = RunDirectory.at("R")
        return prepare(config, [], report=lambda _: None, code=LaunchCode(directory, **options)).directory

    return make


def digests(directory):
    return [json.loads(line)["digest"] for line in directory.code_records.read_text().splitlines()]


def test_a_new_run_has_its_code_and_the_manifest_says_so(project, prepared):
    directory = prepared(*OWN)
    code = current_code(directory)
    assert (code.folder / "my_task.py").read_text() == TASK
    assert (code.root, code.submit_dir) == (project, project)
    size = len(TASK) + len("runs/\nR*/\n")
    wanted = {"digest": code.digest, "folder": f"code/{code.digest}", "files": 2, "bytes": size}
    assert json.loads(directory.manifest.read_text())["code"] == wanted


def test_a_run_keeps_its_code_until_today_s_is_wanted(project, prepared):
    first = current_code(prepared(*OWN)).digest
    (project / "my_task.py").write_text(f"{TASK}\nNEW = 1\n")
    assert current_code(prepared(*OWN)).digest == first
    directory = prepared(*OWN, now=True)
    assert current_code(directory).digest != first
    assert prepared(*OWN, now=True) == directory
    assert len(digests(directory)) == 2  # today's is the recorded one
    assert json.loads(directory.manifest.read_text())["code"]["digest"] == first


def test_switched_off_and_on(project, prepared):
    directory = prepared(*OWN, "code.snapshot=none")
    assert current_code(directory) is None
    assert not directory.code.exists()
    assert json.loads(directory.manifest.read_text())["code"] is None
    first = current_code(prepared(*OWN)).digest  # there was nothing to keep
    assert current_code(prepared(*OWN, "code.snapshot=none")) is None
    assert digests(directory) == [first, None]


def test_ranks_that_were_started_by_hand_have_no_copy(project, composer):
    directory = prepare(composer.compose(["run_dir=R"]), []).directory
    assert current_code(directory) is None


@pytest.fixture
def large(project):
    (project / "data.bin").write_bytes(bytes(2_000_000))
    return project


def test_own_code_that_cannot_be_copied_is_refused_before_anything_is_written(large, composer):
    config = composer.compose(["run_dir=R", "code.max_mb=1", *OWN])
    with pytest.raises(ConfigError, match=r"^code\.snapshot=auto: the code in .* data\.bin alone 2 MB; leave it out"):
        prepare_launch(config, [])
    assert not (large / "R").exists()


def test_built_in_code_is_not_needed(large, prepared):
    warnings = []
    directory = prepared("code.max_mb=1", warn=warnings.append)
    assert current_code(directory) is None
    (line,) = warnings
    assert line.startswith("the code isn't copied, so the run imports what is there when it starts: the code in")


def test_a_program_that_trains_in_its_process_only_warns(large, prepared):
    warnings = []
    assert current_code(prepared("code.max_mb=1", *OWN, required=False, warn=warnings.append)) is None
    assert len(warnings) == 1


def test_which_trainings_need_code(project, composer):
    assert not needs_code(composer.compose(["optimizer=sgd", "model=gpt", "task=text"]))
    assert needs_code(composer.compose(OWN))
    assert not needs_code(composer.compose(["optimizer=custom", "optimizer._target_=torch.optim.Adagrad"]))


def test_a_package_behind_an_import_hook_is_warned_of(project, prepared, monkeypatch):
    (packages,) = hooked(project, "env").glob("lib/*/*")
    monkeypatch.syspath_prepend(packages)  # as those of a user are, outside of sys.prefix
    warnings = []
    prepared(*OWN, warn=warnings.append)
    assert warnings[0].startswith("mine: installed editable by an import hook")


def hooked(project, name):
    """An environment in which setuptools' import hook finds a package of the project."""
    packages = project / name / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    mapping = {"mine": str(project / "lib" / "mine"), "other": "/opt/other"}
    hook = f"MAPPING: dict[str, str] = {mapping!r}\nNAMESPACES: dict[str, list[str]] = {{}}\n"
    (packages / "__editable___mine_1_finder.py").write_text(hook)
    return project / name


def test_a_hook_in_the_program_s_own_python_is_warned_of(project, directory):
    hooked(project, ".venv")
    warnings = []
    config = ProgramConfig(name="p", run=ProgramRun(command=["train"]))
    LaunchCode(directory, warn=warnings.append).assign_to(directory, config)
    assert warnings[0].startswith("mine: installed editable by an import hook")


def test_today_s_code_of_a_program_has_links_to_what_it_wrote(project):
    def use(**options):
        config = ProgramConfig(name="p", run_dir="R", run=ProgramRun(command=["true"]))
        directory = RunDirectory.at("R")
        directory.create(config.mode)
        LaunchCode(directory, **options).assign_to(directory, config)
        return current_code(directory)

    first = use()
    (first.folder / "outputs").mkdir()
    (first.folder / "outputs" / "last.pt").write_text("work")
    (first.folder / "notes").write_text("its own")
    (project / "my_task.py").write_text(f"{TASK}\nNEW = 1\n")
    (project / "notes").write_text("mine")
    warnings = []
    second = use(now=True, warn=warnings.append)
    assert second.folder != first.folder
    assert (second.folder / "outputs" / "last.pt").read_text() == "work"
    assert (second.folder / "notes").read_text() == "mine"
    (line,) = warnings
    assert line.startswith(f"notes, which the program wrote into {first.folder}: today's code has the same names")
    shutil.rmtree(second.folder)  # lost, so its contents aren't known
    (project / "my_task.py").write_text(f"{TASK}\nNEW = 2\n")
    assert use(now=True, warn=warnings.append).folder.is_dir()
    assert "isn't there in today's code" in warnings[1]


def test_today_s_code_takes_the_place_of_a_damaged_copy_of_the_same(project, directory):
    config = ProgramConfig(name="p", run=ProgramRun(command=["true"]))
    LaunchCode(directory).assign_to(directory, config)
    folder = current_code(directory).folder
    (folder / "my_task.py").unlink()
    (folder / "outputs").mkdir()
    (folder / "outputs" / "last.pt").write_text("work")
    with pytest.raises(RunDirectoryError, match=r"my_task\.py was removed .*--code=now`$"):
        LaunchCode(directory).assign_to(directory, config)
    warnings = []
    LaunchCode(directory, now=True, warn=warnings.append).assign_to(directory, config)
    assert (current_code(directory).folder, current_code(directory).find_damage()) == (folder, "")
    assert (folder / "outputs" / "last.pt").read_text() == "work"
    remedy = "today's files take their place, and what was there is named NAME.damaged-..."
    assert warnings == [f"{folder} was changed since it was taken (my_task.py): {remedy}"]
    directory.path.rename(directory.path.with_name("moved"))
    moved = directory.path.with_name("moved") / "code" / folder.name
    assert (moved / "outputs" / "last.pt").read_text() == "work"


def test_an_error_keeps_what_was_repaired(project, prepared):
    directory = prepared(*OWN)
    code = current_code(directory)
    (code.folder / "my_task.py").unlink()
    (code.folder / "mine").write_text("work")
    with pytest.raises(KeyboardInterrupt):
        interrupted(prepared, *OWN, now=True)
    assert (code.find_damage(), (code.folder / "mine").read_text()) == ("", "work")


def interrupted(prepared, *words, **options):
    with rollback_on_error("R"):
        prepared(*words, **options)
        raise KeyboardInterrupt


def tree(path):
    """Every file below a folder, with its content."""
    return {str(each.relative_to(path)): each.is_file() and each.read_bytes() for each in path.rglob("*")}


def test_an_error_leaves_no_code(project, prepared, composer):
    with pytest.raises(KeyboardInterrupt):
        interrupted(prepared, *OWN)
    assert not (project / "R").exists()
    directory = prepared(*OWN)
    before = tree(directory.path)
    (project / "my_task.py").write_text(f"{TASK}\nNEW = 1\n")
    with pytest.raises(KeyboardInterrupt):
        interrupted(prepared, *OWN, now=True)
    assert tree(directory.path) == before


def sweep(composer, count, **options):
    runs = [SweepRun(composer.compose([*OWN, f"run_dir=R/{n}", f"seed={n}"])) for n in range(count)]
    return Sweep(RunDirectory.at("R"), [], **options).prepared(runs, 0o750)


def refused_beside(other, composer):
    """A sweep whose folder another launch takes first."""
    record = SweepRecord(kind="grid", space={}, fixed=(), folder=".", submitted=0.0, command=())
    with rollback_on_error("R"):
        other.enter_context(sweep(composer, 1, record=record))
        other.enter_context(sweep(composer, 1))


def test_an_undo_leaves_the_code_and_the_record_of_another_launch_into_the_same_sweep(project, composer):
    with contextlib.ExitStack() as other:
        with pytest.raises(RunDirectoryError, match="another command is launching"):
            refused_beside(other, composer)
        assert code_for_attempt(RunDirectory.at("R/0"))[1] == ""
        assert (project / "R" / "sweep.json").exists()


def interrupted_after(composer):
    with rollback_on_error("R"):
        with sweep(composer, 1):
            pass
        raise KeyboardInterrupt


def test_an_undo_leaves_the_code_of_runs_that_stay(project, composer):
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(composer)
    assert code_for_attempt(RunDirectory.at("R/0"))[1] == ""


def test_the_runs_of_a_sweep_share_one_copy(project, composer):
    with sweep(composer, 3) as plans:
        pass
    codes = {current_code(run.directory).folder for run in plans}
    assert codes == {project / "R" / "code" / next(iter(codes)).name}
    found = json.loads(plans[2].directory.manifest.read_text())["code"]["folder"]
    assert found == f"../code/{next(iter(codes)).name}"
    assert all(not run.directory.code.exists() for run in plans)


def test_a_sweep_takes_today_s_code_for_all_its_runs(project, composer):
    for now in (False, False, True):
        with sweep(composer, 2, code_now=now) as plans:
            digests = {current_code(run.directory).digest for run in plans}
        (project / "my_task.py").write_text(f"{TASK}\nNOW = {now}\n")
        assert len(list((project / "R" / "code").glob("*.json"))) == 1 + now
    assert (project / "R" / "code" / digests.pop() / "my_task.py").read_text() == f"{TASK}\nNOW = False\n"
    assert not digests


def test_a_sweep_that_fails_leaves_what_others_use(project, composer):
    with pytest.raises(KeyboardInterrupt), sweep(composer, 2):
        raise KeyboardInterrupt
    assert not (project / "R").exists()
    with sweep(composer, 1):
        pass
    before = tree(project / "R")
    with pytest.raises(KeyboardInterrupt), sweep(composer, 3):
        raise KeyboardInterrupt
    assert tree(project / "R") == before


def programs(count, words=(), *, command=("true", "{args.n}"), **options):
    composer = ProgramComposer(list(command))
    runs = [SweepRun(composer.compose_run([f"args.n={n}", f"run_dir=R/{n}", *words])) for n in range(count)]
    with Sweep(RunDirectory.at("R"), [], **options).prepared(runs, 0o750) as plans:
        return [run.directory for run in plans]


def test_each_program_of_a_sweep_has_its_own_copy_also_with_today_s_code(project, capsys):
    (project / "outputs").mkdir()
    (project / "outputs" / "old").write_text("by hand")
    (project / ".gitignore").write_text("R*/\noutputs/\n")
    runs = programs(3)
    assert "warning: each run has its own outputs, empty at first; if the program reads" in capsys.readouterr().err
    for run in runs[:2]:
        folder = code_for_attempt(run)[0].folder
        assert folder.parent == run.code
        (folder / "outputs" / "last").write_text(run.path.name)
    (folder / "my_task.py").unlink()
    with pytest.raises(RunDirectoryError, match=r"R/1/code/\w+/my_task\.py was removed .*--code=now`$"):
        programs(3)
    programs(3, code_now=True)  # the same code
    assert code_for_attempt(runs[1])[1] == ""
    warnings = capsys.readouterr().err
    assert f"{folder} was changed since it was taken (my_task.py)" in warnings
    assert "empty at first" not in warnings
    (project / "my_task.py").write_text("")
    programs(3, code_now=True)
    for run in runs[:2]:
        folder = code_for_attempt(run)[0].folder
        assert (folder / "my_task.py").read_text() == ""
        assert (folder / "outputs" / "last").read_text() == run.path.name
    assert not runs[2].code.exists()  # it hasn't begun
    assert list((code_for_attempt(runs[2])[0].folder / "outputs").iterdir()) == []
    with pytest.raises(ConfigError, match=r"^run\.cwd=shared: the run in .* began with own, and its files are there"):
        programs(3, ["run.cwd=shared"])


def test_the_programs_of_a_sweep_share_outputs_if_configured_or_begun_so(project):
    for run in programs(2, ["run.cwd=shared"]):
        assert "own_paths" not in run.code_records.read_text()  # nor did earlier versions write that
        text = run.config.read_text().split("  own_folders:")[0].replace("  cwd: shared\n", "")
        run.config.write_text(f"{text}  signal: TERM\n")
    (project / "my_task.py").write_text("")
    for now in (False, True):
        folders = {code_for_attempt(run)[0].folder for run in programs(2, code_now=now)}
        assert [folder.parent for folder in folders] == [project / "R" / "code"]


def test_a_sweep_s_programs_in_an_empty_folder_have_their_own(folder):
    for run in programs(2):
        assert code_for_attempt(run)[0].folder.parent == run.code


def test_programs_of_a_sweep_without_a_copy_are_warned_that_they_share_their_files(folder, capsys):
    assert (
        main(["run", "-m", "code.snapshot=none", "args.n=1,2", "cluster.dry_run=true", "--", "true", "{args.n}"]) == 0
    )
    line = "hpctrain: warning: code.snapshot=none: all runs have the same working directory, and share its files\n"
    assert capsys.readouterr().err == line


def test_a_resume_names_what_was_purged_rather_than_what_it_leads_to(project, prepared, capsys):
    (project / "other.py").write_text("")
    directory = prepared(*OWN)
    for file in current_code(directory).folder.glob("*.py"):
        file.unlink()
    assert main(["resume", "R"]) == 2
    error = capsys.readouterr().err
    assert "2 of 3 files were removed since the code was taken (my_task.py, other.py): restore them, or take" in error
    assert error.endswith("R --code=now`\n")


def test_a_resume_checks_classes_in_the_code_that_will_run(project, prepared):
    directory = prepared(*OWN, "+task.size=2")
    (project / "my_task.py").write_text(TASK.replace("size", "other"))
    assert changed_config(directory, ["trainer.max_steps=9"], None).trainer.max_steps == 9
    with pytest.raises(ConfigError, match=r"task\.size"):
        changed_config(directory, [], None, code_now=True)
    (project / "my_task.py").unlink()
    assert changed_config(directory, [], None).task["size"] == 2


def test_a_resume_without_its_code_says_what_to_do(project, prepared, capsys):
    directory = prepared(*OWN)
    code = current_code(directory)
    (code.folder / "my_task.py").chmod(0o600)
    (code.folder / "my_task.py").write_text("")
    with pytest.raises(RunDirectoryError, match=r"my_task\.py was changed .*resume .*/R --code=now`$"):
        prepared(*OWN)
    code.folder.rename(project / "elsewhere")
    assert main(["resume", "R"]) == 2
    assert "the code of this run, is missing: restore it, or take today's" in capsys.readouterr().err


def committed(folder):
    for words in (["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(
            ["git", "-C", folder, "-c", "user.name=me", "-c", "user.email=me@example.org", *words], check=True
        )


def test_today_s_code_is_that_of_the_run_s_own_folder(project, prepared, monkeypatch, capsys):
    (project / "lib").mkdir()
    (project / "lib" / "a.py").write_text("")
    committed(project)
    directory = prepared(*OWN)
    for name in ("lib", "../clone/lib"):
        if "clone" in name:
            subprocess.run(["git", "clone", "-q", project, project.parent / "clone"], check=True)
        expected = (project / name).resolve().parent
        monkeypatch.chdir(project / name)
        before = tree(directory.path)
        assert main(["resume", str(directory.path), "--code=now"]) == 2
        remedy = f"type `cd {expected} && python -m hpctrain resume {directory.path} --code=now`"
        line = f"{directory.path}: its code comes from {expected}, not from {expected / 'lib'}: {remedy}\n"
        assert capsys.readouterr().err == f"hpctrain: error: {line}"
        assert tree(directory.path) == before
        monkeypatch.chdir(expected)
        require_original_folder([directory], pytest.fail)
    elsewhere = project.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(RunDirectoryError, match=rf"its code comes from {project}, not from {elsewhere}"):
        require_original_folder([directory])
    directory.path.rename(elsewhere / "R")
    project.rename(project.with_name("renamed"))
    warnings = []
    require_original_folder([RunDirectory.at("R")] * 2, warnings.append)
    where = f"{project}, from which the code of {elsewhere / 'R'} comes, is gone"
    assert warnings == [f"{where}: today's code is that in {elsewhere}"]
    monkeypatch.chdir(project.with_name("renamed"))
    require_original_folder([RunDirectory.at(elsewhere / "R")], pytest.fail)
    monkeypatch.chdir("lib")
    with pytest.raises(RunDirectoryError, match=rf"type `cd {project.with_name('renamed')} && "):
        require_original_folder([RunDirectory.at(elsewhere / "R")])


def test_the_command_of_a_rank(project, prepared, composer, monkeypatch):
    directory = prepared(*OWN)
    code = current_code(directory)
    run = plan(composer.compose(["run_dir=R", *OWN]))
    assert run.rank_command(None)[1:] == ["-u", "-m", "hpctrain.train"]
    assert run.rank_command(code)[1:] == ["-P", "-u", "-m", "hpctrain.train"]
    assert run.code_variables(None, {}) == {}
    assert run.code_variables(code, {"PYTHONPATH": "/opt"}) == {"PYTHONPATH": f"{code.folder}:/opt"}


def test_a_local_attempt_is_not_started_with_code_that_was_changed(project, prepared, composer, capsys):
    directory = prepared(*OWN)
    code = current_code(directory)
    (code.folder / "my_task.py").unlink()
    assert launch_local(plan(composer.compose(["run_dir=R", *OWN]))) == 1
    (attempt,) = Ledger(directory).attempts()
    assert (attempt.reason, attempt.code) == (Reason.FAILED, code.digest)
    line = f"{code.folder}/my_task.py was removed since the code was taken: restore it, or take today's code with"
    assert attempt.detail.startswith(line)
    assert capsys.readouterr().err.startswith(f"hpctrain: failed: {line}")


def test_an_attempt_that_never_had_ranks_has_no_code(project, prepared):
    directory = prepared(*OWN)
    Ledger(directory).claim()
    (project / "my_task.py").write_text(f"{TASK}\nNEW = 1\n")
    prepared(*OWN, now=True)
    UnrecordedEnds(directory, Slurm()).close(1)
    (attempt,) = Ledger(directory).attempts()
    assert (attempt.reason, attempt.code) == (Reason.INFRASTRUCTURE, None)


def test_files_of_secrets_are_named(project, prepared):
    (project / ".env").write_text("PASSWORD=x")
    warnings = []
    prepared(*OWN, warn=warnings.append)
    assert warnings == [SECRETS]
