"""Requests of GPUs, in each form that a site may demand: the number, the type, and what the ranks see."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

    Hpctrain = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.sandbox("--gpu-types")
TRAIN = [sys.executable, str(Path(__file__).parent / "programs" / "bare_ddp.py"), "pace", "3"]
SHOW = ["bash", "-c", 'echo "sees $CUDA_VISIBLE_DEVICES"; exec "$@"', "_"]
FORMS = {
    "gpus_per_node": ("cluster.gpu_type=h100", "cluster.gpus_per_node=2"),
    "gres": ("cluster.gpu_type=h100", "cluster.gpus_per_node=2", "cluster.gpu_request=gres"),
    "gres with another": (
        "cluster.gpu_type=h100",
        "cluster.gpus_per_node=2",
        "cluster.gpu_request=gres",
        "cluster.sbatch.gres=nvme:1",
    ),
    "gpus_per_task": ("cluster.gpu_type=h100", "cluster.gpus_per_node=2", "cluster.gpu_request=gpus_per_task_type"),
    "sbatch.gres": ("cluster.sbatch.gres='gpu:h100:2,nvme:1'",),
}
REQUESTS = {
    "gpus_per_node": "TresPerNode=gpu:h100:2",
    "gres": "TresPerNode=gpu:h100:2",
    "gres with another": "TresPerNode=nvme:1,gpu:h100:2",
    "gpus_per_task": r"TresPerTask=\S*gpu:h100[:=]1",  # since 26.05 with the cores
    "sbatch.gres": "TresPerNode=gpu:h100:2,nvme:1",
}
"""Patterns of SLURM's record, without `gres:` or `gres/`."""


@pytest.fixture
def hpctrain(sandbox: SlurmSandbox, tmp_path: Path) -> Hpctrain:
    """Type `python -m hpctrain ...` and wait for it."""
    (tmp_path / "pace").write_text("0")

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return sandbox.run([sys.executable, "-m", "hpctrain", *words], cwd=tmp_path, timeout=280)

    return command


def job_id(run: Path) -> str:
    return str(json.loads((run / "jobs.jsonl").read_text().splitlines()[-1])["job_id"])


def logs(run: Path) -> list[str]:
    return [path.read_text() for path in sorted((run / "logs").glob("rank_*.log"))]


def assert_trained(sandbox: SlurmSandbox, run: Path, request: str, *, gpu_type: str = "h100", node: str = "n3") -> None:
    """The ranks trained on a node with GPUs of this type, and each saw all of them."""
    texts = logs(run)
    assert [re.findall(r"^sees (.*)$", text, re.MULTILINE) for text in texts] == [["0,1"]] * 2
    assert all("step 3" in text for text in texts)
    record = sandbox.ask("scontrol", "--details", "--oneliner", "show", "job", job_id(run))
    assert re.search(rf" {request}\s", re.sub("gres[:/]", "", record)), record
    assert re.search(rf"JOB_GRES=\S*gpu:{gpu_type}:2\b", record)
    assert f" NodeList={node} " in record


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("gpus_per_node", marks=pytest.mark.nightly),
        pytest.param("gres", marks=pytest.mark.nightly),
        "gres with another",
        "gpus_per_task",
        pytest.param("sbatch.gres", marks=pytest.mark.nightly),
    ],
)
def test_a_type_of_gpu_in_each_form(sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path, form: str) -> None:
    words = ["cluster=slurm", "cluster.cpus_per_process=1", "cluster.wait=true", "run_dir=R", *FORMS[form]]
    done = hpctrain("run", *words, "--", *SHOW, *TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_trained(sandbox, tmp_path / "R", REQUESTS[form])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "option", "seen"),
    [
        ("gpus_per_node", "--gres=gpu:1", "0"),
        ("gpus_per_node", "--gpus-per-task=1", "1"),
        ("gpus_per_task", "--gres=gpu:1", "0"),
    ],
)
def test_a_step_with_gpus_of_its_own(hpctrain: Hpctrain, tmp_path: Path, form: str, option: str, seen: str) -> None:
    words = ["cluster=slurm", "cluster.wait=true", "run_dir=R", f"cluster.srun_args=['{option}']", *FORMS[form]]
    done = hpctrain("run", *words, "--", *SHOW, "true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^sees (.*)$", (tmp_path / "R" / "logs" / "rank_1.log").read_text(), re.MULTILINE) == [seen]


def test_a_type_that_the_site_or_the_partition_lacks(hpctrain: Hpctrain, tmp_path: Path) -> None:
    words = ["run", "cluster=slurm", "run_dir=R", "cluster.gpus_per_node=2"]
    lacking = hpctrain(*words, "cluster.gpu_type=v100", "--", "true")
    assert lacking.returncode == 2, lacking.stdout + lacking.stderr
    a100, h100 = "a100 (2 per node, on 2 nodes)", "h100 (2 per node, on 2 nodes)"
    assert f"cluster.gpu_type=v100: is not a type of GPU that the cluster has; choose {a100}, or {h100}\n" in (
        lacking.stderr
    )
    elsewhere = hpctrain(*words, "cluster.gpu_type=h100", "cluster.partition=a100", "--", "true")
    assert elsewhere.returncode == 2, elsewhere.stdout + elsewhere.stderr
    assert (
        f"cluster.gpu_type=h100: is not a type of GPU that partition a100 has; choose {a100}, or set "
        "cluster.partition to h100 or high or low\n"
    ) in elsewhere.stderr


@pytest.mark.nightly
def test_a_resume_with_another_type_and_form(sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path) -> None:
    words = ["cluster=slurm", "cluster.cpus_per_process=1", "cluster.wait=true", "run_dir=R", *FORMS["gres"]]
    assert hpctrain("run", *words, "cluster.setup=['false']", "--", *SHOW, *TRAIN).returncode == 1
    changes = ["cluster.gpu_type=a100", "cluster.gpu_request=gpus_per_node", "cluster.setup=[]"]
    again = hpctrain("resume", "R", *changes)
    assert again.returncode == 0, again.stdout + again.stderr
    assert_trained(sandbox, tmp_path / "R", "TresPerNode=gpu:a100:2", gpu_type="a100", node="n1")


ONLY_GRES = pytest.mark.sandbox("--gpu-types", "--gpu-form=gres")
ONLY_TASKS = pytest.mark.sandbox("--gpu-types", "--gpu-form=gpus-per-task")


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(None, marks=pytest.mark.nightly),
        pytest.param("gres", marks=ONLY_GRES),
        pytest.param("gpus_per_task_type", marks=[ONLY_TASKS, pytest.mark.nightly]),
    ],
)
def test_the_site_file_of_the_doctor_has_the_form_that_the_site_accepts(
    sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path, form: str | None
) -> None:
    done = hpctrain("doctor", "--json", "cluster=slurm", "cluster.gpus_per_node=2", "cluster.cpus_per_process=1")
    record = json.loads(done.stdout)
    # the sandbox's GPUs are files, which ranks can't use
    assert [one["check"] for one in record["findings"]] == ["devices"]
    site = tmp_path / record["site_file"]
    types = "a100 (2 per node, on 2 nodes) and h100 (2 per node, on 2 nodes)"
    assert f"# values of cluster.gpu_type here: {types}\n" in site.read_text()
    keys = {"gpu_type": "a100"} | ({} if form is None else {"gpu_request": form})
    assert {name: value for name, value in yaml.safe_load(site.read_text()).items() if name.startswith("gpu_")} == keys
    assert all(re.search(rf"# {key}: the first .*that sbatch accepts\n", site.read_text()) for key in keys)
    run = hpctrain("run", f"cluster={site.stem}", "cluster.wait=true", "run_dir=R", "--", *SHOW, "true")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "gpu:a100:2" in sandbox.ask("scontrol", "--details", "show", "job", job_id(tmp_path / "R"))
    assert "\nsees 0,1\n" in f"\n{(tmp_path / 'R' / 'logs' / 'rank_1.log').read_text()}"


@pytest.mark.nightly
def test_a_request_of_no_gpus_on_nodes_that_have_some(hpctrain: Hpctrain) -> None:
    done = hpctrain("doctor", "cluster=slurm", "cluster.cpus_per_process=1", "cluster.partition=h100")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = " ".join(done.stdout.split())
    assert "GPUs: h100 (2 per node, on 2 nodes); to request them: cluster.gpus_per_node=2" in shown
    assert "no fault was found" in shown
