import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import submitit

from hpctrain.config.resources import resources_of
from hpctrain.errors import ConfigError, RunDirectoryError, SchedulerError, SchedulerMissingError
from hpctrain.launch import sbatch
from hpctrain.launch.prepare import RunPlan, plan
from hpctrain.launch.submission import SETUP_TRAP, SHELL, script, submit
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.status.jobs import SETUP_ERROR
from hpctrain.supervise.ranks import srun_command

EVERYTHING = [
    "cluster=slurm",
    "nodes=2",
    "name=every-key",
    "cluster.partition=gpu",
    "cluster.account=me",
    "cluster.qos=high",
    "cluster.gpus_per_node=4",
    "cluster.gpus_per_process=2",
    "cluster.cpus_per_process=3",
    "cluster.memory_gb=1.5",
    "cluster.time_limit_min=90",
    "cluster.constraint='a100&nvlink'",
    "cluster.exclude='n[3-4]'",
    "cluster.reservation=today",
    "cluster.signal=USR1",
    "cluster.signal_delay_s=120",
    "cluster.setup=['module load cuda','export A=1']",
    "cluster.srun_args=['--cpu-bind=cores']",
    "cluster.sbatch.licenses='matlab:1'",
    "cluster.sbatch.exclusive=true",
    "cluster.sbatch.comment='two words; rm -rf $HOME'",
]

TEXT = """\
#!/bin/bash

# Parameters
#SBATCH --account=me
#SBATCH --comment='two words; rm -rf $HOME'
#SBATCH --constraint='a100&nvlink'
#SBATCH --cpus-per-task=3
#SBATCH --exclude='n[3-4]'
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --job-name=every-key
#SBATCH --licenses=matlab:1
#SBATCH --mem=1536M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/runs/R/logs/batch_%j.log
#SBATCH --partition=gpu
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --reservation=today
#SBATCH --signal=USR1@120
#SBATCH --time=90

# setup
# the supervisor handles these; they must end neither this shell nor a supervisor that isn't ready yet
trap '' TERM USR1 USR2
# if the supervisor is killed, a new one ends its ranks and continues; at most three times in an allocation
supervise() {
    for left in 3 2 1 0; do
        "$@" && code=0 || code=$?
        [ $code -gt 128 ] && [ $left -gt 0 ] || exit $code
        sleep 1
    done
}
trap '_code=$? _line=$LINENO; if [ ${#BASH_SOURCE[@]} -eq 1 ]; then \\
mapfile -t -s $((_line - 1)) -n 1 _text <"$0"; \\
echo "hpctrain: error: a line of cluster.setup failed: $_text (exit code $_code); \
correct it, or append || true if it may fail" >&2; exit 1; fi' ERR
module load cuda
export A=1
trap - ERR

# command
export SUBMITIT_EXECUTOR=slurm
supervise PYTHON -P -u -m submitit.core._submit /runs/R/logs/submitit
"""


@pytest.fixture
def run():
    return RunDirectory.at("/runs/R")


FAILS = {  # with the exit code
    "nosuch load cuda/12": 127,
    "fails now": 3,
    ". ./bashrc": 1,
    "cd /nosuch": 1,
    "cat /nosuch | false": 1,
    "export TOKEN; false; echo $?": 1,
}
WORKS = [  # though a command in it fails
    "if false; then",
    "  echo",
    "fi",
    "false || true",
    "fails now || true",
    ". ./bashrc || true",
    "[ -f /nosuch ] && . /nosuch",
    "# a comment",
    ". ./profile",
    "activates env",
    "export TOKEN=$(false)",
    "ulimit -c 0",
    "false | true",
]
FUNCTIONS = ["fails() {", "    false", "    return 3", "}", "activates() { false; true; }"]


@pytest.fixture
def batch_script(tmp_path):
    """Executes a batch script with these lines of cluster.setup."""
    (tmp_path / "profile").write_text("false\ntrue\n")  # a site's, in which a command fails on purpose
    (tmp_path / "bashrc").write_text("[ -f /nosuch ] && . /nosuch\n")  # it works, and returns 1

    def execute(*setup):
        (tmp_path / "script").write_text("\n".join([SETUP_TRAP, *setup, "trap - ERR", "false", "echo trains"]))
        return subprocess.run(["/bin/bash", "script"], cwd=tmp_path, capture_output=True, text=True, check=False)

    return execute


OPTIONS = ["", "set -u", "set -o pipefail", "unset PATH"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("line", FAILS)
def test_a_line_of_the_setup_that_fails_ends_the_job(batch_script, options, line):
    done = batch_script(*FUNCTIONS, options, line)
    assert (done.returncode, done.stdout) == (1, "")
    remedy = "correct it, or append || true if it may fail"
    assert done.stderr.splitlines()[-1] == f"{SETUP_ERROR}{line} (exit code {FAILS[line]}); {remedy}"


@pytest.mark.parametrize("options", OPTIONS)
def test_a_line_of_the_setup_that_works_ends_nothing(batch_script, options):
    lines = [line for line in WORKS if "| true" not in line or options != "set -o pipefail"]
    done = batch_script(*FUNCTIONS, options, *lines)
    assert (done.returncode, done.stdout) == (0, "trains\n"), done.stderr
    assert SETUP_ERROR not in done.stderr


def test_every_key_reaches_the_script(composer, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # in a checkout of hpctrain, that is imported from there
    assert script(plan(composer.compose(EVERYTHING)), run).replace(sys.executable, "PYTHON") == TEXT


def test_an_array_is_throttled(composer, run):
    text = script(plan(composer.compose(["cluster=slurm", "cluster.max_parallel_runs=2"])), run, runs=5)
    assert "#SBATCH --array=0-4%2\n" in text
    assert "#SBATCH --output=/runs/R/logs/batch_%A_%a.log\n" in text


def test_an_array_without_a_limit_has_none(composer, run):
    assert "#SBATCH --array=0-299%300\n" in script(plan(composer.compose(["cluster=slurm"])), run, runs=300)


@pytest.mark.parametrize(
    ("words", "nodes", "cores"),
    [
        (["cluster.min_nodes=3"], "4-8", 1),  # 3 doesn't divide the batch
        (["cluster.min_nodes=1", "cluster.spare_nodes=1"], "1-9", 1),
        (["cluster.min_nodes=1", "cluster.processes_per_node=2"], "1-8", 2),
        (["cluster.min_nodes=1", "cluster.processes_per_node=2", "cluster.cpus_per_process=3"], "1-8", 6),
    ],
)
def test_a_range_of_nodes_with_one_task_on_each(composer, run, words, nodes, cores):
    made = plan(composer.compose(["cluster=slurm", "nodes=8", *words]))
    text = script(made, run)
    for line in (f"--nodes={nodes}", f"--cpus-per-task={cores}", "--no-kill"):
        assert f"#SBATCH {line}\n" in text
    assert "ntasks" not in text
    command = srun_command(made, ("n2", "n3", "n5", "n6"))
    ranks = made.resources.processes_per_node
    assert command[1:4] == ["--nodes=4", f"--ntasks={4 * ranks}", f"--ntasks-per-node={ranks}"]
    assert f"--cpus-per-task={made.resources.cpus_per_process or 1}" in command


def test_a_flag_that_is_switched_off_is_left_out(composer, run):
    assert "exclusive" not in script(plan(composer.compose(["cluster=slurm", "cluster.sbatch.exclusive=false"])), run)


@pytest.mark.parametrize(("value", "line"), [("expedite", "--requeue=expedite"), ("true", "--requeue")])
def test_a_kind_of_requeue_reaches_sbatch(composer, run, value, line):
    text = script(plan(composer.compose(["cluster=slurm", f"+cluster.sbatch.requeue={value}"])), run)
    assert f"#SBATCH {line}\n" in text
    assert "no-requeue" not in text


@pytest.mark.parametrize("word", ["+cluster.sbatch.no-requeue=true", "+cluster.sbatch.requeue=false"])
def test_a_user_can_forbid_the_requeue(composer, run, word):
    text = script(plan(composer.compose(["cluster=slurm", word])), run)
    assert "#SBATCH --no-requeue\n" in text
    assert "#SBATCH --requeue\n" not in text


def test_srun_gets_what_sbatch_would_not_hand_on(composer, run):
    config = composer.compose(EVERYTHING)
    command = srun_command(RunPlan(config, run, resources_of(config)))
    assert command == [
        "srun",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--kill-on-bad-exit=1",
        "--wait=15",
        f"--job-name={run.step_name}",
        "--export=ALL",
        "--open-mode=append",
        "--output=/runs/R/logs/rank_%t.log",
        "--cpus-per-task=3",
        "--cpu-bind=cores",
        sys.executable,
        "-u",
        "-m",
        "hpctrain.train",
        "/runs/R",
    ]


def test_the_name_of_the_step_does_not_hide_that_of_the_job_from_the_ranks(composer):
    # a program among the arguments, such as numactl, comes before all that is the worker's
    made = plan(composer.compose(["cluster=slurm", "cluster.srun_args=[numactl,'--localalloc']"]))
    command = srun_command(made, job_name="my digits")
    environment = ["numactl", "--localalloc", "env", "SLURM_JOB_NAME=my digits", sys.executable]
    assert command[command.index("numactl") :][:5] == environment


def test_a_rank_that_hangs_at_its_exit_costs_no_more_than_half_of_a_short_grace_time(composer, run):
    (wait,) = (word for word in srun_command(plan(composer.compose(["cluster=slurm"]))) if word.startswith("--wait="))
    assert int(wait.partition("=")[2]) <= 30 / 2


@pytest.fixture
def planned(composer):
    return lambda directory: plan(composer.compose(["cluster=slurm", f"run_dir='{directory.path}'"]))


def fake_sbatch(folder, monkeypatch, lines):
    tool = folder / "sbatch"
    tool.write_text("#!/bin/sh\n" + lines)
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def fresh(tmp_path):
    directory = RunDirectory.at(tmp_path / "R")
    directory.create(0o750)
    return directory


def test_submitting_from_inside_an_allocation_leaks_nothing(planned, fresh, tmp_path, monkeypatch):
    fake_sbatch(tmp_path, monkeypatch, f"env > {tmp_path}/seen\necho Submitted batch job 77\n")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    assert submit([planned(fresh)], fresh) == ["77"]
    seen = (tmp_path / "seen").read_text()
    assert "SLURM_JOB_ID" not in seen
    assert "SBATCH_PARTITION" not in seen
    assert "SLURM_CONF=/etc/slurm.conf" in seen
    assert os.environ["SLURM_JOB_ID"] == "5"
    assert JobRecords(fresh).read()[0]["job_id"] == "77"
    assert JobRecords(fresh).read()[0]["log"] == f"{fresh.logs}/batch_77.log"


@pytest.fixture
def sweep_in(planned, tmp_path, monkeypatch):
    """Submits a sweep of two runs in a folder that exists, with a umask of 022."""
    fake_sbatch(tmp_path, monkeypatch, f"umask > {tmp_path}/seen\necho Submitted batch job 78\n")

    def submit_in(home):
        home = RunDirectory.at(home)
        before = os.umask(0o022)
        try:
            runs = [RunDirectory.at(home.path / name) for name in ("0", "1")]
            home.create_for_sweep(0o750)
            for run in runs:
                run.create(0o750)
            submit([planned(run) for run in runs], home)
        finally:
            os.umask(before)
        return home

    return submit_in


@pytest.mark.parametrize(
    ("mode", "folder", "file", "umask"),
    [(0o777, 0o750, 0o640, "0027"), (0o1777, 0o750, 0o640, "0027"), (0o700, 0o700, 0o600, "0077")],
)
def test_a_sweep_in_an_open_folder_is_no_more_open_than_its_runs(tmp_path, sweep_in, mode, folder, file, umask):
    """Whoever writes the pickle of a job executes code as its user."""
    (tmp_path / "S" / "older").mkdir(parents=True)
    (tmp_path / "S").chmod(mode)
    home = sweep_in(tmp_path / "S")
    written = [home.logs, *home.logs.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written if path.is_dir()} == {folder}
    assert {path.suffix for path in written if path.is_file()} == {".pkl", ".sh"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in written if path.is_file()} == {file}
    assert stat.S_IMODE(home.path.stat().st_mode) == mode
    assert (tmp_path / "seen").read_text() == f"{umask}\n"


def test_open_folders_of_an_earlier_submission_are_closed(tmp_path, sweep_in):
    submitit = tmp_path / "S" / "logs" / "submitit"
    submitit.mkdir(parents=True)
    for path in (submitit, submitit.parent, submitit.parent.parent):
        path.chmod(0o777)
    sweep_in(tmp_path / "S")
    assert [stat.S_IMODE(path.stat().st_mode) & 0o022 for path in (submitit, submitit.parent)] == [0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_for_pickles_that_another_user_put_there_is_refused(tmp_path, sweep_in, linked):
    logs = tmp_path / "S" / "logs"
    logs.parent.mkdir()
    logs.parent.chmod(0o1777)
    if linked:
        (tmp_path / "own").mkdir()
        logs.symlink_to(tmp_path / "own")
    else:
        logs.mkdir()
    os.chown(logs, 65_534, 65_534, follow_symlinks=False)
    with pytest.raises(RunDirectoryError, match=r"S/logs belongs to another user, .*; choose another folder"):
        sweep_in(tmp_path / "S")
    assert list(logs.iterdir()) == []


def test_a_generous_umask_opens_neither_pickles_nor_logs(planned, tmp_path, monkeypatch):
    fake_sbatch(tmp_path, monkeypatch, f"umask > {tmp_path}/seen\necho Submitted batch job 78\n")
    before = os.umask(0o002)
    try:
        home = RunDirectory.at(tmp_path / "S")
        home.create_for_sweep(0o750)
        runs = [RunDirectory.at(home.path / name) for name in ("0", "1")]
        for run in runs:
            run.create(0o750)
        submit([planned(run) for run in runs], home)
    finally:
        os.umask(before)
    written = [home.path, *home.path.rglob("*")]
    assert [path.name for path in written if path.stat().st_mode & 0o027] == []
    assert len([path for path in written if path.suffix == ".pkl"]) == 2
    # sbatch hands its umask to the batch script, so the script's log and all that it starts have it
    assert (tmp_path / "seen").read_text() == "0027\n"


def test_an_array_gives_each_run_its_task(planned, fresh, tmp_path, monkeypatch):
    fake_sbatch(tmp_path, monkeypatch, "echo Submitted batch job 78\n")
    runs = [RunDirectory.at(tmp_path / "R" / name) for name in ("0", "1")]
    for run in runs:
        run.create(0o750)
    assert submit([planned(run) for run in runs], fresh) == ["78_0", "78_1"]
    assert JobRecords(runs[1]).read()[0]["log"] == f"{fresh.logs}/batch_78_1.log"


def test_what_sbatch_refuses_is_a_bad_configuration(planned, fresh, tmp_path, monkeypatch):
    fake_sbatch(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="invalid partition specified: x"):
        submit([planned(fresh)], fresh)


NO_NODES = (
    "echo 'sbatch: error: Batch job submission failed: Requested node configuration is not available' >&2\nexit 1\n"
)
GPU_NODES = """\
NodeName=n1 Gres=gpu:a100:2(S:0) Partitions=low,a100
NodeName=n2 Gres=gpu:h100:4,nvme:1 Partitions=low,h100
NodeName=n3 Gres=(null) Partitions=low
"""
A100, H100 = "a100 (2 per node, on 1 node)", "h100 (4 per node, on 1 node)"
UNKNOWN = "is not a type of GPU that"
REFUSED = "sbatch refused the job: Batch job submission failed: Requested node configuration is not available"
ELSEWHERE = f"choose {A100}, or set cluster.partition to h100 or low"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpus_per_node=2", "gpu_type=v100"], f".gpu_type=v100: {UNKNOWN} the cluster has; choose {A100}, or {H100}"),
        (
            ["gpus_per_node=2", "gpu_type=h100", "partition=a100"],
            f".gpu_type=h100: {UNKNOWN} partition a100 has; {ELSEWHERE}",
        ),
        (
            ["sbatch.gres='gpu:a100:1,gpu:v100:1'"],
            f".sbatch.gres=gpu:a100:1,gpu:v100:1: v100 {UNKNOWN} the cluster has; choose {A100}, or {H100}",
        ),
        (
            ["gpus_per_node=4", "gpu_type=a100"],
            f"=slurm: {REFUSED}; the cluster has {A100} in partitions a100, low: request fewer GPUs or nodes",
        ),
        (
            ["gpus_per_node=4", "gpu_type=a100", "partition=a100"],
            f"=slurm: {REFUSED}; partition a100 has {A100}: request fewer GPUs or nodes",
        ),
        (["gpus_per_node=4"], f"=slurm: {REFUSED}; see `sinfo` and cluster.*"),
    ],
)
def test_a_type_of_gpu_that_the_site_lacks_is_answered_with_those_it_has(
    composer, fresh, tmp_path, monkeypatch, words, message
):
    fake_sbatch(tmp_path, monkeypatch, NO_NODES)
    (tmp_path / "nodes").write_text(GPU_NODES)
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $* >>{tmp_path}/asked\ncat {tmp_path}/nodes\n")
    (tmp_path / "scontrol").chmod(0o755)
    keys = [f"cluster.{word}" for word in words]
    config = composer.compose(["cluster=slurm", f"run_dir={fresh.path}", *keys])
    with pytest.raises(ConfigError) as caught:
        submit([RunPlan(config, fresh, resources_of(config))], fresh)
    assert str(caught.value) == f"cluster{message}"
    has_type = "100" in "".join(words)
    assert (tmp_path / "asked").exists() == has_type
    if has_type:
        assert (tmp_path / "asked").read_text() == "--all --oneliner show node\n"


POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("message", "is_limit"),
    [
        (f"QOSMaxSubmitJobPerUserLimit\nsbatch: error: {POLICY}", True),
        (f"AssocGrpSubmitJobsLimit\nsbatch: error: {POLICY}", True),
        (POLICY, True),
        ("Batch job submission failed: Resource temporarily unavailable", True),
        (f"AssocMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}", False),
        ("Batch job submission failed: Requested node configuration is not available", False),
    ],
)
def test_a_full_queue_differs_from_a_job_that_asks_for_too_much(
    planned, fresh, tmp_path, monkeypatch, message, is_limit
):
    (tmp_path / "message").write_text(f"sbatch: error: {message}\n")
    fake_sbatch(tmp_path, monkeypatch, f"cat {tmp_path}/message >&2\nexit 1\n")
    with pytest.raises(ConfigError) as raised:
        submit([planned(fresh)], fresh)
    assert isinstance(raised.value, sbatch.SubmitLimitError) == is_limit


def test_a_controller_that_is_gone_is_not(planned, fresh, tmp_path, monkeypatch):
    fake_sbatch(
        tmp_path,
        monkeypatch,
        "echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller' >&2\nexit 1\n",
    )
    with pytest.raises(SchedulerError, match="Unable to contact slurm controller"):
        submit([planned(fresh)], fresh)


def test_a_machine_without_slurm_is_an_error(planned, fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerMissingError, match="login node"):
        submit([planned(fresh)], fresh)


def test_an_sbatch_that_never_answers_is_killed(planned, fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(sbatch, "SBATCH_TIMEOUT_S", 0.5)
    fake_sbatch(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid\nexec sleep 60\n")
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(SchedulerError) as raised:
        submit([planned(fresh)], fresh)
    assert str(raised.value) == (
        "sbatch did not answer within 0.5 s; it may have submitted a job, which would fail at its start: look for it "
        "with `squeue --me --name=digits`, cancel it with `scancel JOB`, and run the command again"
    )
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    assert (signal.getsignal(signal.SIGALRM), JobRecords(fresh).read()) == (before, [])


@pytest.mark.parametrize("count", [1, 2])
def test_only_sbatch_is_bounded_and_not_the_files_of_an_array(planned, tmp_path, monkeypatch, count):
    monkeypatch.setattr(sbatch, "SBATCH_TIMEOUT_S", 0.5)
    home = RunDirectory.at(tmp_path / "S")
    home.create_for_sweep(0o750)
    runs = [RunDirectory.at(home.path / str(number)) for number in range(count)]
    for run in runs:
        run.create(0o750)
    dump = submitit.core.utils.cloudpickle_dump

    def dump_slowly(*words):
        time.sleep(0.6)
        dump(*words)

    monkeypatch.setattr(submitit.core.utils, "cloudpickle_dump", dump_slowly)
    fake_sbatch(tmp_path, monkeypatch, "echo Submitted batch job 79\n")
    assert len(submit([planned(run) for run in runs], home)) == count
    assert len(list(home.logs.rglob("*_submitted.pkl"))) == count
    fake_sbatch(tmp_path, monkeypatch, "exec sleep 60\n")
    with pytest.raises(SchedulerError, match="did not answer within"):
        submit([planned(run) for run in runs], home)


def test_an_answer_without_a_number_may_be_a_job(planned, fresh, tmp_path, monkeypatch):
    fake_sbatch(tmp_path, monkeypatch, "echo welcome to our cluster\n")
    with pytest.raises(SchedulerError, match=r"\"welcome to our cluster\"; it may have submitted a job"):
        submit([planned(fresh)], fresh)


@pytest.mark.parametrize(
    ("supervisor", "starts", "code"),
    [("kill -KILL $$", 4, 137), ("[ $starts -lt 3 ] && kill -KILL $$; exit 4", 3, 4), ("exit 1", 1, 1), (":", 1, 0)],
)
def test_the_shell_starts_the_supervisor_again_if_it_was_killed(tmp_path, supervisor, starts, code):
    log = tmp_path / "starts"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/bash\necho >> {log}\nstarts=$(wc -l < {log})\n{supervisor}\n")
    program.chmod(0o755)
    # a user's own lines may switch these on
    text = "\n".join([*SHELL, "set -euo pipefail", "sleep() { :; }", f"supervise {program}"])
    done = subprocess.run(["bash", "-c", text], stderr=subprocess.DEVNULL, check=False)
    assert (len(log.read_text().splitlines()), done.returncode) == (starts, code)


@pytest.mark.parametrize("script", ["train.sbatch", "program.sbatch", "torchrun.sbatch"])
def test_the_shipped_scripts_have_the_same_loop(script):
    shipped = [line.strip() for line in (Path(__file__).parents[3] / "slurm" / script).read_text().splitlines()]
    *_, loop, _, condition, pause, end, _ = [line.strip() for line in SHELL]
    assert shipped.index(loop) < shipped.index(condition) == len(shipped) - 3
    assert shipped[-2:] == [pause, end]
    assert "&& code=0 || code=$?" in shipped[-4]


@pytest.fixture
def array(planned, tmp_path):
    """A sweep's directory, and two runs in it."""
    home = RunDirectory.at(tmp_path / "S")
    home.create_for_sweep(0o750)
    runs = [RunDirectory.at(home.path / name) for name in ("0", "1")]
    for run in runs:
        run.create(0o750)
    return home, runs


CANCELS = '#!/bin/sh\necho "$@" >> {}/cancelled\n'


@pytest.mark.parametrize("cancels", [True, False])
@pytest.mark.parametrize("full", [("0", "1"), ("1",)])
def test_a_job_that_cannot_be_recorded_is_cancelled(planned, array, tmp_path, monkeypatch, full, cancels):
    home, runs = array
    links = "\n".join(f"ln -s /dev/full {home.path}/{name}/jobs.jsonl" for name in full)
    fake_sbatch(tmp_path, monkeypatch, f"{links}\necho Submitted batch job 78\n")
    (tmp_path / "scancel").write_text(CANCELS.format(tmp_path) if cancels else "#!/bin/sh\nexit 1\n")
    (tmp_path / "scancel").chmod(0o755)
    with pytest.raises(SchedulerError, match="No space left on device") as raised:
        submit([planned(run) for run in runs], home)
    lost = "78" if len(full) == 2 else "78_1"
    assert str(raised.value).startswith(f"job {lost} could ")
    assert str(raised.value).endswith("run the command again" if cancels else f"cancel with `scancel {lost}`")
    assert ("; job 78_0 stayed; " in str(raised.value)) == (len(full) == 1)
    assert not cancels or (tmp_path / "cancelled").read_text() == f"{lost}\n"
    kept = ["78_0_submitted.pkl", "78_submission.sh"] if len(full) == 1 else []
    assert sorted(path.name for path in home.submitit.iterdir() if not path.is_symlink()) == kept
    assert runs[0].jobs.is_file() == (len(full) == 1)


@pytest.mark.parametrize("folder", ["/sys/kernel", "/proc/self/task"])
def test_files_that_cannot_be_written_are_no_missing_sbatch(planned, fresh, tmp_path, monkeypatch, folder):
    fake_sbatch(tmp_path, monkeypatch, "echo Submitted batch job 77\n")
    fresh.submitit.symlink_to(folder)
    with pytest.raises(RunDirectoryError, match=r"R: the job's script can't be written \(/.*nothing was submitted"):
        submit([planned(fresh)], fresh)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("kill -INT $PPID\nexec sleep 60\n", "sbatch was interrupted"),
        ("kill -KILL $$\n", r"sbatch was killed by signal 9"),
        ("echo 'sbatch: error: Socket timed out on send/recv operation' >&2\nexit 1\n", "Socket timed out"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python left the killed one
def test_an_sbatch_that_could_not_answer_may_have_submitted(planned, fresh, tmp_path, monkeypatch, lines, message):
    fake_sbatch(tmp_path, monkeypatch, lines)
    with pytest.raises(SchedulerError, match=rf"{message}.*; it may have submitted a job, .* --name=digits`"):
        submit([planned(fresh)], fresh)
    assert list(fresh.submitit.iterdir()) == []


def test_a_ctrl_c_while_the_job_is_recorded_cancels_it(planned, fresh, tmp_path, monkeypatch):
    fake_sbatch(tmp_path, monkeypatch, "echo Submitted batch job 77\n")
    (tmp_path / "scancel").write_text(CANCELS.format(tmp_path))
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setattr(JobRecords, "add", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SchedulerError, match=r"job 77 could not be recorded \(interrupted\), and had to be cancelled"):
        submit([planned(fresh)], fresh)
    assert (tmp_path / "cancelled").read_text() == "77\n"
