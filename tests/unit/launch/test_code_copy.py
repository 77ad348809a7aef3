"""Code that a launch copies, from real repositories and folders."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hpctrain
from hpctrain.config.code import Code
from hpctrain.config.run import ProgramRun
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.launch import code_files
from hpctrain.launch.code_files import find_code, is_home
from hpctrain.launch.launch_code import copy_code
from hpctrain.run.directory import RunDirectory

IDENTITY = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "protocol.file.allow=always")


def git(folder, *words):
    subprocess.run(["git", "-C", folder, *IDENTITY, *words], check=True, capture_output=True)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def files_in(folder):
    """Every file below a folder by its path, with its text, or the target of a link after an arrow."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file():
            found[name] = path.read_text()
    return found


@pytest.fixture
def home(tmp_path):
    """The directory of a new run, outside of the code."""
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    return directory


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A repository with one commit: train.py, pkg/net.py, and a .gitignore for data/ and *.log."""
    root = tmp_path_factory.mktemp("prepared")
    git(root, "init", "-q")
    write(root, {"train.py": "lr = 1\n", "pkg/net.py": "width = 8\n"})
    (root / ".gitignore").write_text("data/\n*.log\nruns/\n__pycache__/\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


@pytest.fixture
def repository(prepared, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(prepared, tmp_path / "repository"))


def take(folder, home, warn=lambda _: None, own_folders=None, **settings):
    return copy_code(folder, Code(**settings), home, 0o750, own_folders=own_folders, warn=warn)


BASE = {".gitignore": "data/\n*.log\nruns/\n__pycache__/\n", "pkg/net.py": "width = 8\n", "train.py": "lr = 1\n"}


def test_tracked_and_untracked_files_as_they_are_now(repository, home):
    write(repository, {"train.py": "lr = 2\n", "new.py": "x = 1\n"})
    (repository / "pkg" / "net.py").unlink()
    taken = take(repository, home)
    now = {".gitignore": BASE[".gitignore"], "new.py": "x = 1\n", "train.py": "lr = 2\n"}
    assert files_in(taken.folder) == now
    assert (taken.folder, taken.files) == (home.code / taken.digest, 3)
    assert taken.bytes == sum(map(len, now.values()))
    commit = subprocess.check_output(["git", "-C", repository, "rev-parse", "HEAD"], text=True).strip()
    assert taken.commit == commit
    assert taken.find_damage() == ""


def test_what_git_ignores_is_linked(repository, home):
    write(repository, {"data/a.bin": "a", "out.log": "b", "pkg/x.log": "c", "runs/old/config.yaml": "d"})
    write(repository, {"pkg/__pycache__/net.pyc": "e"})
    links = {name: f"-> {repository / name}" for name in ("data", "out.log", "pkg/x.log", "runs")}
    assert files_in(take(repository, home).folder) == BASE | links


def test_copies_are_new_whatever_the_age_of_the_originals(repository, home):
    write(repository, {"data/a.bin": "a"})
    for path in (repository, *repository.rglob("*")):
        os.utime(path, (1, 1))
    taken = take(repository, home)
    assert all(path.lstat().st_mtime > 1e9 for path in (taken.folder, *taken.folder.rglob("*"), home.code))


@pytest.mark.parametrize("in_git", [True, False], ids=["git", "folder"])
def test_each_run_has_its_own_output_folders(repository, home, tmp_path, in_git):
    write(
        repository, {"data/a": "a", "pkg/logs/b.log": "b", "outputs/last.pt": "c", "wandb/d/e.log": "d", "mine/f": "f"}
    )
    write(repository, {"runs/plot.py": "x = 1\n", "runs/plot.yaml": "y", "results/base.csv": "g", "results/h.log": "h"})
    for name in ("scratch/deep", "logs"):
        (repository / name).mkdir(parents=True)
    (tmp_path / "storage").mkdir()
    (repository / "checkpoints").symlink_to(tmp_path / "storage")
    (repository / ".gitignore").write_text("data/\nwandb/\n*.log\nscratch/\nlogs\nmine/\n")
    git(repository, "add", "results", "checkpoints")
    if not in_git:
        shutil.rmtree(repository / ".git")
    own = ["checkpoints", "outputs", "pkg/logs", "results", "wandb"]
    own = sorted([*own, "logs", "scratch"] if in_git else own)
    taken = take(repository, home, own_folders=ProgramRun().own_folders)
    assert list(taken.own_paths) == own
    assert all((taken.folder / name).is_dir() and not (taken.folder / name).is_symlink() for name in own)
    copied = {"train.py", "pkg/net.py", ".gitignore", "runs/plot.py", "runs/plot.yaml"}
    copied |= {"results/base.csv"} if in_git else {"data/a", "mine/f"}
    linked = {"data", "mine"} if in_git else set()
    assert files_in(taken.folder).keys() == copied | linked
    assert taken.find_damage() == ""


def test_own_folders_are_configurable(repository, home):
    write(repository, {"data/a": "a", "outputs/b": "b", "weights/c": "c", "last.pt": "d"})
    (repository / ".gitignore").write_text("data/\noutputs/\nweights/\n*.pt\n")
    taken = take(repository, home, own_folders=["weights/", "*.pt"])
    assert taken.own_paths == ("last.pt", "weights")
    links = {name for name, text in files_in(taken.folder).items() if text.startswith("->")}
    assert links == {"data", "outputs"}
    assert list((taken.folder / "weights").iterdir()) == []


def test_a_folder_that_contains_the_run_is_not_linked(repository):
    directory = RunDirectory.at(repository / "runs" / "a" / "b")
    directory.create(0o750)
    assert files_in(take(repository, directory).folder) == BASE


def make_run(path):
    """What each launched run has on the disk."""
    directory = RunDirectory.at(path)
    directory.create(0o750)
    write(directory.path, {"config.yaml": "lr: 1\n", "logs/rank_0.log": "loss 1\n"})
    write(directory.path, {f"code/{DIGEST}/train.py": "old", f"code/{DIGEST}.json": "{}"})


DIGEST = "0123456789abcdef" * 2
MINE = {"runs/plot.py": "a", "experiments/config.yaml": "b", "experiments/manifest.json": "c", "sets/sweep.json": "d"}


@pytest.mark.parametrize("in_git", [True, False], ids=["git", "folder"])
@pytest.mark.parametrize("where", ["outputs", "sweep"])
def test_runs_and_sweeps_are_not_copied_but_what_lies_beside_them_is(repository, where, in_git):
    (repository / ".gitignore").unlink()
    make_run(repository / "runs" / "digits" / "1")
    make_run(repository / "sweep" / "0")
    write(repository, {f"sweep/code/{DIGEST}/train.py": "old", f"sweep/code/{DIGEST}.json": "{}"})
    write(repository, {"sweep/sweep.json": "{}", "sweep/logs/submitit/7_submission.pkl": "x", **MINE})
    if not in_git:
        shutil.rmtree(repository / ".git")
    directory = RunDirectory.at(repository / where)
    directory.create_for_sweep(0o750)
    for _ in range(2):
        found = files_in(take(repository, directory).folder)
        assert found == {name: BASE[name] for name in ("pkg/net.py", "train.py")} | MINE


@pytest.mark.parametrize("in_git", [True, False], ids=["git", "folder"])
def test_copies_of_any_sweep_are_not_copied_and_folders_that_only_have_its_names_are(repository, home, in_git):
    copies = [f"waiting/code/{DIGEST}/train.py", f"old/code/{DIGEST}.json", "killed/code/.tmp-copy-01234567/train.py"]
    mine = {"log/code.jsonl": "a", "log/jobs.jsonl": "b", "log/1/net.py": "c", "pkg/code/net.py": "d"}
    write(repository, dict.fromkeys(copies, "old") | mine)
    if not in_git:
        shutil.rmtree(repository / ".git")
    assert files_in(take(repository, home).folder) == BASE | mine


def test_a_run_that_is_being_made_is_not_copied(repository, home):
    (repository / ".gitignore").unlink()
    RunDirectory.at(repository / "runs" / "digits" / "1").create(0o750)
    write(repository, {"runs/digits/1/code/.tmp-copy-01234567/train.py": "half", "runs/digits/1/code.jsonl": ""})
    assert files_in(take(repository, home).folder) == {name: BASE[name] for name in ("pkg/net.py", "train.py")}


def test_a_run_in_the_folder_of_the_code_itself_is_refused(repository):
    with pytest.raises(ConfigError, match=r": run_dir=.* is the folder of the code itself; choose a folder in it"):
        take(repository / "pkg", RunDirectory.at(repository))


def test_a_virtual_environment_is_linked_though_git_does_not_ignore_it(repository, home):
    write(repository, {"env/pyvenv.cfg": "home = /usr\n", "env/lib/big.py": "x"})
    assert files_in(take(repository, home).folder) == BASE | {"env": f"-> {repository / 'env'}"}


def test_a_folder_of_secrets_is_linked_and_one_that_is_named_like_a_file_of_secrets_is_copied(repository, home):
    write(repository, {".aws/credentials": "key", "token/net.py": "x", "secrets.yaml": "y", ".env.example": "NAME="})
    git(repository, "add", "-f", ".")
    warnings = []
    copy = take(repository, home, warnings.append)
    linked = {name: f"-> {repository / name}" for name in (".aws", "secrets.yaml")}
    assert files_in(copy.folder) == BASE | linked | {"token/net.py": "x", ".env.example": "NAME="}
    assert warnings[0].startswith(".aws, secrets.yaml: not copied with the code")
    copy = take(repository, home, pytest.fail, include=["secrets.*", ".aws"])
    assert files_in(copy.folder)["secrets.yaml"] == "y"
    assert files_in(copy.folder)[".aws/credentials"] == "key"
    shutil.rmtree(repository / ".git")
    take(repository, home, warnings.append)
    assert warnings[-1].startswith(".aws, secrets.yaml: not copied with the code")


def test_secrets_are_linked(repository, home):
    names = [".env", "pkg/.env.local", ".netrc", "tls.pem", "tls.key", "id_rsa", "pkg/id_ed25519.pub", "id_ecdsa"]
    names += ["credentials.json", "pkg/credentials-gcp.json", ".pgpass", ".envrc"]
    write(repository, dict.fromkeys(names, "KEY=hunter2"))
    git(repository, "add", "-f", ".")
    linked = {name: f"-> {repository / name}" for name in names}
    assert files_in(take(repository, home).folder) == BASE | linked


@pytest.mark.parametrize("pattern", ["pkg", "pkg/", "/pkg", "p?g", "pkg/*"])
def test_excluded_files_are_linked(repository, home, pattern):
    found = files_in(take(repository, home, exclude=[pattern]).folder)
    name = "pkg/net.py" if pattern == "pkg/*" else "pkg"
    assert found == {name: f"-> {repository / name}", **{key: BASE[key] for key in (".gitignore", "train.py")}}


def test_the_working_directory_in_a_subfolder(repository, home):
    taken = take(repository / "pkg", home)
    code = taken
    assert (code.root, code.place) == (repository, "pkg")
    assert (code.working_directory / "net.py").read_text() == "width = 8\n"
    assert code.submit_dir == repository / "pkg"


def test_an_empty_working_directory_exists(repository, home):
    (repository / "empty").mkdir()
    assert take(repository / "empty", home).working_directory.is_dir()


def test_a_working_directory_that_git_ignores_is_taken_as_a_folder(repository, home):
    write(repository, {"data/mine/task.py": "x = 1\n"})
    taken = take(repository / "data" / "mine", home)
    assert files_in(taken.folder) == {"task.py": "x = 1\n"}
    assert taken.root == repository / "data" / "mine"


def test_a_working_directory_that_git_ignores_may_contain_the_run(repository):
    write(repository, {"data/mine/task.py": "x = 1\n"})
    directory = RunDirectory.at(repository / "data" / "mine" / "runs" / "1")
    directory.create(0o750)
    assert files_in(take(repository / "data" / "mine", directory).folder) == {"task.py": "x = 1\n"}


def test_a_working_directory_inside_a_run_is_taken_as_a_folder(repository, home):
    (repository / ".gitignore").unlink()
    make_run(repository / "runs" / "1")
    inside = repository / "runs" / "1" / "code" / DIGEST
    assert files_in(take(inside, home).folder) == {"train.py": "old"}


EMPTY = ["out", "pkg/out", "new/out/deep", "party/out"]


@pytest.mark.parametrize("in_git", [True, False], ids=["git", "folder"])
def test_empty_folders_are_there_for_a_program_that_writes_into_them(repository, prepared, home, in_git):
    write(repository, {"new/a.py": "x = 1\n"})
    shutil.copytree(prepared, repository / "party")
    hidden = ["data/out", "runs/out", "left/out", "env/out", "party/data/out"]
    for name in [*EMPTY, *hidden, "__pycache__"]:
        (repository / name).mkdir(parents=True)
    write(repository, {"env/pyvenv.cfg": "home = /usr\n", "left/a.bin": "a"})
    make_run(repository / "old")
    if not in_git:
        for inside in (repository, repository / "party"):
            shutil.rmtree(inside / ".git")
        (repository / "data").rename(repository / ".data")
    for _ in range(2):
        folder = take(repository, home, exclude=["left"]).folder
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()}
        found = {path for path in found if not (folder / path).is_symlink()}
        more = {"new", "new/out", "party", "party/pkg", "pkg"}
        more |= set() if in_git else {"runs", "runs/out", "party/data", "party/data/out"}
        assert found == {*EMPTY, *more}
        (folder / "out").rmdir()


def test_an_empty_folder_is_not_made_where_the_program_wrote_something_else(repository, home, tmp_path):
    for name in ("out/deep", "other"):
        (repository / name).mkdir(parents=True)
    folder = take(repository, home).folder
    shutil.rmtree(folder / "out")
    (folder / "out").symlink_to(tmp_path)
    (folder / "other").rmdir()
    (folder / "other").write_text("x")
    assert take(repository, home).folder == folder
    assert not (tmp_path / "deep").exists()


def test_links_stay_inside_if_they_can(repository, home, tmp_path):
    write(tmp_path, {"elsewhere/a.bin": "a"})
    (repository / "pkg" / "same.py").symlink_to("../train.py")
    (repository / "whole.py").symlink_to(repository / "pkg" / "net.py")
    (repository / "folder").symlink_to("pkg")
    (repository / "scratch").symlink_to(tmp_path / "elsewhere")
    (repository / "pkg" / "up").symlink_to("../../elsewhere")
    (repository / "nowhere").symlink_to("gone")
    (repository / "latest").symlink_to("scratch")
    found = files_in(take(repository, home).folder)
    outside = f"-> {tmp_path / 'elsewhere'}"
    links = {"pkg/same.py": "-> ../train.py", "whole.py": "-> pkg/net.py", "folder": "-> pkg", "nowhere": "-> gone"}
    links["latest"] = "-> scratch"
    assert found == BASE | links | {"scratch": outside, "pkg/up": outside}


def test_absolute_links_by_another_name_of_the_repository_stay_inside(repository, home, tmp_path):
    (tmp_path / "name").symlink_to(repository)
    (tmp_path / "above").symlink_to(tmp_path)
    (repository / "a.py").symlink_to(tmp_path / "name" / "pkg" / "net.py")
    (repository / "pkg" / "b.py").symlink_to(tmp_path / "above" / "repository" / "train.py")
    (repository / "pkg" / "c.py").symlink_to("../../name/train.py")
    (repository / "whole").symlink_to(tmp_path / "name")
    found = files_in(take(repository, home).folder)
    links = {"a.py": "-> pkg/net.py", "pkg/b.py": "-> ../train.py", "pkg/c.py": "-> ../train.py", "whole": "-> ."}
    assert found == BASE | links


@pytest.mark.parametrize("in_git", [True, False], ids=["git", "folder"])
def test_links_to_what_the_copy_does_not_have_lead_to_the_original(repository, in_git):
    directory = RunDirectory.at(repository / "outputs" / "1")
    directory.create(0o750)
    write(repository, {"data/a.bin": "a", "outputs/old/last.pt": "x", "outputs/1/out": "y"})
    (repository / ".gitignore").write_text("data/\noutputs/\n")
    if not in_git:
        shutil.rmtree(repository / ".git")
        make_run(repository / "outputs" / "old")
    (repository / "best").symlink_to("outputs/old/last.pt")
    (repository / "a.bin").symlink_to("data/a.bin")
    folder = take(repository, directory).folder
    assert (folder / "a.bin").readlink() == Path("data/a.bin")
    assert (folder / "best").readlink() == repository / "outputs/old/last.pt"


def test_permissions(repository, home):
    (repository / "train.py").chmod(0o777)
    folder = take(repository, home).folder
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in ("train.py", "pkg/net.py", "pkg")}
    assert modes == {"train.py": 0o550, "pkg/net.py": 0o440, "pkg": 0o750}
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(home.code.stat().st_mode) == 0o750


def test_a_copy_has_no_permissions_that_its_source_has_not(repository, home):
    (repository / "train.py").chmod(0o700)
    (repository / "pkg" / "net.py").chmod(0o600)
    folder = take(repository, home).folder
    modes = [stat.S_IMODE((folder / name).stat().st_mode) for name in ("train.py", "pkg/net.py")]
    assert modes == [0o500, 0o400]


def test_equal_code_is_copied_once(repository, home):
    first = take(repository, home)
    entry = (first.folder / "train.py").stat().st_ino
    os.utime(repository / "train.py", (1, 1))
    again = take(repository / "pkg", home)
    assert again.folder == first.folder
    assert (again.folder / "train.py").stat().st_ino == entry
    (repository / "train.py").chmod(0o755)
    assert take(repository, home).digest != first.digest
    assert len(list(home.code.iterdir())) == 4  # two folders, each with its list


def test_equal_code_gets_links_that_are_new(repository, home):
    folder = take(repository, home).folder
    write(repository, {"data/a.bin": "a"})
    assert take(repository, home).folder == folder
    assert (folder / "data" / "a.bin").read_text() == "a"


def test_an_earlier_copy_that_was_changed_is_repaired(repository, home):
    first = take(repository, home)
    place = first.folder / "train.py"
    place.chmod(0o600)
    place.write_text("lr = 3\n")
    shutil.rmtree(first.folder / "pkg")
    first.list.unlink()
    warnings = []
    again = take(repository, home, warnings.append)
    assert (again, again.find_damage()) == (first, "")
    (line,) = warnings
    assert all(path in line for path in ("pkg/net.py", "train.py"))
    (aside,) = first.folder.glob("train.py.damaged-*")
    assert aside.read_text() == "lr = 3\n"
    take(repository, home, pytest.fail)


def test_launches_at_once_make_one_copy(repository, home):
    barrier = threading.Barrier(4)

    def act(_):
        barrier.wait()
        return take(repository, home).folder

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(act, range(4)))) == 1
    assert len(list(home.code.iterdir())) == 2


def test_submodules_and_repositories_inside(repository, prepared, home):
    git(repository, "submodule", "add", "-q", str(prepared), "third/party")
    git(repository, "submodule", "add", "-q", str(prepared), "absent")
    git(repository, "commit", "-qm", "submodules")
    git(repository, "submodule", "deinit", "-q", "-f", "absent")
    shutil.copytree(prepared, repository / "clone")
    write(repository, {"third/party/new.py": "x = 1\n", "third/party/a.log": "a"})
    (repository / "third" / "party" / "train.py").unlink()
    found = files_in(take(repository, home).folder)
    assert found.pop(".gitmodules")
    inside = {f"clone/{name}": text for name, text in BASE.items()}
    inside |= {f"third/party/{name}": BASE[name] for name in (".gitignore", "pkg/net.py")}
    inside |= {"third/party/new.py": "x = 1\n", "third/party/a.log": f"-> {repository / 'third/party/a.log'}"}
    assert found == BASE | inside


def test_a_worktree(repository, home, tmp_path):
    git(repository, "worktree", "add", "-q", str(tmp_path / "tree"))
    assert files_in(take(tmp_path / "tree", home).folder) == BASE


def test_names_that_are_not_utf8(repository, home):
    name = os.fsdecode(b"caf\xe9.py")
    (repository / name).write_text("x = 1\n")
    (repository / "a\nb.py").write_text("y = 1\n")
    taken = take(repository, home)
    assert (taken.folder / name).read_text() == "x = 1\n"
    assert (taken.folder / "a\nb.py").read_text() == "y = 1\n"
    assert taken.find_damage() == ""


def test_too_large(repository, home):
    (repository / "weights.bin").write_bytes(bytes(2_000_000))
    with pytest.raises(ConfigError) as caught:
        take(repository, home, max_mb=1)
    assert str(caught.value) == (
        f"code.snapshot=auto: the code in {repository} has more than code.max_mb=1 MB, weights.bin alone 2 MB; "
        "leave it out with code.exclude=[weights.bin] or a line in .gitignore, raise code.max_mb, or copy no code with "
        "code.snapshot=none"
    )
    assert not home.code.exists()
    assert "weights.bin" in files_in(take(repository, home, max_mb=3).folder) | {}


@pytest.mark.parametrize("in_git", [True, False], ids=["git", "folder"])
def test_too_many_files(repository, home, monkeypatch, in_git):
    monkeypatch.setattr(code_files, "MAX_FILES", 5)
    write(repository, {f"images/{n}.png": "x" for n in range(9)})
    if not in_git:
        shutil.rmtree(repository / ".git")
    with pytest.raises(ConfigError, match=r"more than 5 files, images alone .*exclude=\[images\]"):
        take(repository, home)


def test_too_many_folders_outside_of_git(folder, home, monkeypatch):
    monkeypatch.setattr(code_files, "MAX_FILES", 5)
    for number in range(6):
        (folder / "deep" / str(number)).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"more than 5 files, deep alone 3; leave it out with code\.exclude=\[deep\]"):
        take(folder, home)


def test_an_ignored_working_directory_in_a_repository_of_too_many_files(repository, home, monkeypatch):
    monkeypatch.setattr(code_files, "MAX_FILES", 2)
    write(repository, {"data/mine/task.py": "x = 1\n"})
    assert files_in(take(repository / "data" / "mine", home).folder) == {"task.py": "x = 1\n"}


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["ignored", "excluded", "folder"])
def test_more_files_than_can_be_copied_that_are_not_copied(repository, home, how):
    for number in range(code_files.MAX_FILES + 1):
        (repository / f"{number}.bin").touch()
    if how == "ignored":
        (repository / ".gitignore").write_text("*.bin\n")
    elif how == "folder":
        shutil.rmtree(repository / ".git")
    folder = take(repository, home, exclude=[] if how == "ignored" else ["*.bin"]).folder
    assert sum(path.is_symlink() for path in folder.iterdir()) == code_files.MAX_FILES + 1


def test_a_file_that_cannot_be_read(repository, home):
    os.mkfifo(repository / "pipe.py")
    assert files_in(take(repository, home).folder) == BASE
    if os.geteuid():
        (repository / "train.py").chmod(0)
        with pytest.raises(ConfigError, match=r"train\.py can't be read .*exclude=\[train\.py\]"):
            take(repository, home)


def test_files_that_vanish_or_change_kind_meanwhile(repository, home, monkeypatch):
    found = find_code(repository, Code(), home.path)
    shutil.rmtree(repository / "pkg")
    (repository / "pkg").write_text("a file now")
    (repository / "train.py").unlink()
    (repository / "train.py").mkdir()
    monkeypatch.setattr(code_files, "find_code", lambda *_: found)
    assert files_in(take(repository, home).folder) == {".gitignore": BASE[".gitignore"]}


def test_on_a_full_disk_nothing_is_left(repository, home, file_size_limit):
    (repository / "large.py").write_text("x" * 5000)
    with file_size_limit(4096), pytest.raises(RunDirectoryError, match=r"can't be copied.*code\.snapshot=none"):
        take(repository, home)
    assert list(home.code.iterdir()) == []


def test_nothing_that_the_repository_configures_is_executed(repository, home, tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    program.chmod(0o755)
    write(
        repository, {".gitattributes": "*.py filter=evil\n", "train.py": "lr = 2\n", ".git/hooks/post-index-change": ""}
    )
    (repository / ".git" / "hooks" / "post-index-change").unlink()
    (repository / ".git" / "hooks" / "post-index-change").symlink_to(program)
    for key in ("core.fsmonitor", "filter.evil.clean", "filter.evil.smudge"):
        git(repository, "config", key, program)
    git(repository, "status")
    (tmp_path / "executed").unlink()
    take(repository, home)
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_repository_of_another_user(repository, home):
    for path in [repository, *repository.rglob("*")]:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    with pytest.raises(ConfigError, match=rf"another user: trust it with `git config .*directory {repository}`"):
        take(repository / "pkg", home)


@pytest.fixture
def broken_git(tmp_path, monkeypatch):
    """Replaces git by a shell script."""

    def replace(text):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / "git").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        monkeypatch.setattr(code_files, "LIST_TIMEOUT_S", 0.1)

    return replace


@pytest.mark.parametrize(
    ("ends", "problem"),
    [("echo broken >&2; exit 127", "broken"), ("exec sleep 60", "git rev-parse took longer than 0.1 s")],
)
def test_a_repository_that_git_cannot_read_is_refused(repository, home, broken_git, ends, problem):
    broken_git(ends)
    with pytest.raises(ConfigError) as caught:
        take(repository / "pkg", home)
    remedy = "correct that, or copy no code with code.snapshot=none"
    assert str(caught.value) == f"code.snapshot=auto: git can't read the repository {repository} ({problem}); {remedy}"


def test_a_repository_without_the_program_git_is_refused(repository, home, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"git can't be executed: .*No such file.*; correct that"):
        take(repository, home)


def test_a_repository_of_a_newer_git_is_refused(repository, home):
    git(repository, "config", "core.repositoryformatversion", "99")
    with pytest.raises(ConfigError, match=r"git can't read the repository .*version.*99"):
        take(repository, home)


def test_a_folder_does_not_need_git(folder, home, broken_git):
    broken_git("exit 127")
    assert files_in(take(folder, home).folder) == PLAIN
    (folder / ".git").mkdir()  # git says clearly that it is none
    broken_git_text = "echo 'fatal: not a git repository (or any of the parent directories): .git' >&2; exit 128"
    (Path(os.environ["PATH"].partition(":")[0]) / "git").write_text(f"#!/bin/sh\n{broken_git_text}\n")
    assert files_in(take(folder, home).folder) == PLAIN


@pytest.mark.parametrize("inside", [".git", ".git/refs"])
def test_files_of_git_itself_are_no_code(repository, home, inside):
    with pytest.raises(ConfigError, match=r"git can't read .*must be run in a work tree"):
        take(repository / inside, home)


def test_a_broken_submodule_says_how_to_repair_it(repository, prepared, home):
    git(repository, "submodule", "add", "-q", str(prepared), "party")
    shutil.rmtree(repository / ".git" / "modules")
    with pytest.raises(ConfigError, match=r"party \(.*\); repair it with `git submodule update --init party`"):
        take(repository, home)
    assert "party" in files_in(take(repository, home, exclude=["party"]).folder)


def test_a_tracked_folder_that_became_a_link(repository, home, tmp_path):
    (repository / "pkg").rename(tmp_path / "moved")
    (repository / "pkg").symlink_to(tmp_path / "moved")
    rest = {name: BASE[name] for name in (".gitignore", "train.py")}
    assert files_in(take(repository, home).folder) == rest | {"pkg": f"-> {tmp_path / 'moved'}"}
    taken = take(repository, home, exclude=["*.py"]).folder
    assert sorted(files_in(taken)) == [".gitignore", "pkg", "train.py"]


def test_a_sparse_checkout(repository, home):
    write(repository, {"docs/a.md": "a", "docs/deep/b.md": "b"})
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "docs")
    for words in (["--cone"], ["--cone", "--sparse-index"]):
        git(repository, "sparse-checkout", "set", *words, "pkg")
        write(repository, {"new.py": "x = 1\n"})
        assert not (repository / "docs").exists()
        assert files_in(take(repository, home).folder) == BASE | {"new.py": "x = 1\n"}


def test_a_repository_without_commits(tmp_path, home):
    (tmp_path / "new").mkdir()
    git(tmp_path / "new", "init", "-q")
    write(tmp_path / "new", {"train.py": "lr = 1\n"})
    taken = take(tmp_path / "new", home)
    assert (files_in(taken.folder), taken.commit) == ({"train.py": "lr = 1\n"}, "")


@pytest.fixture
def folder(tmp_path):
    """A folder that isn't in a repository."""
    write(tmp_path / "folder", {"train.py": "lr = 1\n", "pkg/net.py": "width = 8\n"})
    return tmp_path / "folder"


PLAIN = {name: BASE[name] for name in ("pkg/net.py", "train.py")}


def test_a_folder_without_git(folder, home):
    write(folder, {"runs/a": "a", "pkg/__pycache__/net.pyc": "b", "venv/pyvenv.cfg": "c", ".cache/d": "d"})
    make_run(folder / "old")
    (folder / "weights.bin").write_bytes(bytes(1_000_001))
    (folder / "notebook.ipynb").write_text("{}")
    (folder / "link").symlink_to("pkg")
    linked = {name: f"-> {folder / name}" for name in ("venv", ".cache", "weights.bin")}
    mine = {"notebook.ipynb": "{}", "link": "-> pkg", "runs/a": "a"}
    assert files_in(take(folder, home).folder) == PLAIN | linked | mine


def test_a_folder_that_contains_the_run(folder):
    directory = RunDirectory.at(folder / "mine" / "run")
    directory.create(0o750)
    for _ in range(2):
        assert files_in(take(folder, directory).folder) == PLAIN


def test_a_folder_that_is_too_large(folder, home):
    write(folder, {f"texts/{n}.txt": "x" * 1000 for n in range(20)})
    with pytest.raises(ConfigError, match=r"code\.max_mb=0\.01 MB, texts alone .*exclude=\[texts\]"):
        take(folder, home, max_mb=0.01)
    assert files_in(take(folder, home, max_mb=0.01, exclude=["texts"]).folder)["texts"] == f"-> {folder / 'texts'}"


def test_a_home_is_not_searched(folder, home, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(ConfigError, match=r"is not a folder of code; change into"):
        take(folder, home)
    git(folder, "init", "-q")  # as for the configuration files in it
    write(folder, {"project/mine.py": "x = 1\n"})
    assert files_in(take(folder / "project", home).folder) == {"mine.py": "x = 1\n"}


def test_an_empty_folder_has_no_code(tmp_path, home):
    (tmp_path / "empty").mkdir()
    assert take(tmp_path / "empty", home) is None
    assert not home.code.exists()


def test_hpctrain_itself_is_linked(home):
    package = Path(hpctrain.__file__).parent
    found = find_code(package.parent, Code(), home.path)
    assert "hpctrain" in found.linked
    assert not any(path.startswith("hpctrain/") for path in found.copied)
    assert "pyproject.toml" in found.copied


def test_a_user_without_a_home(tmp_path, monkeypatch):
    """In a container of a cluster, the user id often has no entry in /etc/passwd."""

    def unknown(_user):
        raise KeyError

    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_home(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not is_home(tmp_path)
    assert is_home(Path("/"))
