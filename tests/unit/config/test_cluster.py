import dataclasses

import pytest

from hpctrain.cluster import launchers
from hpctrain.config.cluster import Local, Slurm
from hpctrain.errors import ConfigError
from hpctrain.run import secret
from hpctrain.run.launcher import PREFIX, LauncherFacts

GPUS = {
    "tres_per_task": ["gres/gpu:1", "cpu=2,gres/gpu:a100:1"],
    "tres-per-task": ["gres/gpu=1"],
    "gpus": [4, "a100:4"],
    "gpus-per-task": [1],
    "gpus_per_socket": [2],
    "gpus-per-node": ["a100:4"],
}
"""What sbatch takes for GPUs, by key."""


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GPUS.items() for value in values])
@pytest.mark.parametrize("gpus_per_node", [None, 4])
def test_options_whose_gpus_nothing_counts_are_refused(name, value, gpus_per_node):
    with pytest.raises(ConfigError, match=r"set cluster\.gpus_per_node=N") as caught:
        Slurm(sbatch={name: value}, gpus_per_node=gpus_per_node)
    assert str(caught.value).startswith(f"cluster.sbatch.{name}={value}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gres", "shard:1"),
        ("gres", "nvme:1"),
        ("gres", "gpu_memory:40"),
        ("gres", "vgpu:1,nvme:2"),
        ("tres-per-task", "cpu=4"),
        ("cpus-per-gpu", 4),
    ],
)
def test_other_resources_are_passed_on(name, value):
    assert Slurm(sbatch={name: value}).sbatch == {name: value}


@pytest.mark.parametrize(
    ("keys", "count", "options"),
    [
        ({}, None, {}),
        ({"gpus_per_node": 0}, 0, {}),
        ({"gpus_per_node": 0, "gpu_type": "a100"}, 0, {}),
        ({"gpus_per_node": 4}, 4, {"gpus-per-node": "4"}),
        ({"gpus_per_node": 4, "gpu_type": "a100"}, 4, {"gpus-per-node": "a100:4"}),
        ({"gpus_per_node": 4, "gpu_request": "gres"}, 4, {"gres": "gpu:4"}),
        ({"gpus_per_node": 4, "gpu_type": "a100", "gpu_request": "gres"}, 4, {"gres": "gpu:a100:4"}),
        ({"gpus_per_node": 4, "gpu_request": "gres", "sbatch": {"gres": "nvme:1"}}, 4, {"gres": "nvme:1,gpu:4"}),
        ({"gpus_per_node": 4, "gpu_request": "gres", "sbatch": {"gres": "none"}}, 4, {"gres": "gpu:4"}),
        ({"sbatch": {"gres": "none"}}, None, {"gres": "none"}),
        ({"gpus_per_node": 4, "sbatch": {"gres": "nvme:1"}}, 4, {"gres": "nvme:1", "gpus-per-node": "4"}),
        ({"gpus_per_node": 4, "gpu_request": "gpus_per_task_type"}, 4, {"gpus-per-task": "2"}),
        (
            {"gpus_per_node": 4, "gpu_type": "a100", "gpu_request": "gpus_per_task_type"},
            4,
            {"gpus-per-task": "a100:2"},
        ),
        ({"gpu_request": "gpus_per_task_type"}, None, {}),
        ({"sbatch": {"gres": "gpu:a100:4,nvme:1"}}, 4, {"gres": "gpu:a100:4,nvme:1"}),
        ({"sbatch": {"gres": "gpu"}, "gpu_request": "gres"}, 1, {"gres": "gpu"}),
        ({"sbatch": {"gres": "gpu:a100:1,gpu:h100:2"}}, 3, {"gres": "gpu:a100:1,gpu:h100:2"}),
    ],
)
def test_each_form_of_a_request_counts_the_gpus_of_a_node(keys, count, options):
    cluster = Slurm(**keys)
    assert cluster.node_gpus == count
    cluster.gpus.check(2, has_min_nodes=False)
    assert cluster.gpus.sbatch_options(tasks_per_node=2) == options


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"gpus_per_node": 0},
            "to keep the gres, set cluster.gpus_per_node=null; to remove all of it, ~cluster.sbatch.gres",
        ),
        ({"gpu_type": "a100"}, "set cluster.gpu_type=null; to remove all of it, ~cluster.sbatch.gres"),
        ({"gpu_request": "gpus_per_node"}, "set cluster.gpu_request=null; to remove all of it, ~cluster.sbatch.gres"),
    ],
)
def test_gpus_in_the_gres_are_the_only_ones(keys, message):
    with pytest.raises(ConfigError) as caught:
        Slurm(sbatch={"gres": "gpu:2"}, **keys)
    assert str(caught.value).startswith("cluster.sbatch.gres=gpu:2: requests GPUs, and cluster.")
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize("gres", ["gpu:", "gpu:a100:x:2", "gpu:a100:2(S:0)"])
def test_a_gres_that_sbatch_would_not_take_for_gpus(gres):
    with pytest.raises(ConfigError, match=r"cluster\.sbatch\.gres=gpu:"):
        Slurm(sbatch={"gres": gres})


@pytest.mark.parametrize(
    ("gres", "message"),
    [
        ("gpu:1,gpu:1", "names the same GPUs twice, and SLURM counts them once; write such as gpu:a100:2"),
        ("gpu:a100:1,nvme:1,gpu:a100:1", "write such as gpu:a100:2"),
        ("gpu:1,gpu:a100:1", "has GPUs with and without a type, which SLURM refuses; write a type for all"),
        ("gpu:3090", "requests 3090 GPUs of any type; a type needs a number, too: write gpu:3090:1"),
        ("gpu:100", "write gpu:100:1"),
        ("gpu:a100:65536", "expected at most 65535 GPUs"),
        ("gpu:999999999P", "expected at most 65535 GPUs"),
    ],
)
def test_gpus_in_the_gres_that_slurm_would_count_in_another_way(gres, message):
    with pytest.raises(ConfigError, match=r"cluster\.sbatch\.gres=gpu:") as caught:
        Slurm(sbatch={"gres": gres})
    assert message in str(caught.value)
    assert Slurm(sbatch={"gres": "gpu:99"}).node_gpus == 99


@pytest.mark.parametrize(("tasks", "has_min_nodes"), [(3, False), (2, True)])
def test_gpus_per_task_that_cannot_be_expressed(tasks, has_min_nodes):
    request = Slurm(gpus_per_node=4, gpu_request="gpus_per_task_type").gpus
    with pytest.raises(ConfigError, match=r"cluster\.gpu_request=gpus_per_task_type.*; choose gpus_per_node or gres"):
        request.check(tasks, has_min_nodes=has_min_nodes)


def test_no_variable_of_a_launcher_can_be_set_by_hand():
    names = {name for launcher in launchers.LAUNCHERS for name in launcher.variables}
    names |= {
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "TORCHELASTIC_RUN_ID",
        "GROUP_RANK",
        "MASTER_ADDR",
    }
    # the layer of config can't import LauncherFacts, and lists these names itself
    names |= {PREFIX + field.name.upper() for field in dataclasses.fields(LauncherFacts)}
    for name in names:
        with pytest.raises(ConfigError, match=f"cluster.env.{name}=1: is set by hpctrain or the launcher"):
            Local(env={name: "1"})
    # settings of libraries stay the user's
    Local(env=dict.fromkeys(["NCCL_SOCKET_IFNAME", "OMPI_MCA_btl", "OMP_NUM_THREADS", "PMIX_MCA_psec", "RANKING"], "1"))
    Local(env=dict.fromkeys(["HPCTRAIN_PYTHON", "HPCTRAIN_STORES"], "1"))


def test_a_secret_is_not_for_a_file_that_others_may_read():
    with pytest.raises(ConfigError, match=r"would be in config\.yaml.*; export it where you start the ranks") as caught:
        Local(env={secret.VARIABLE: "hunter2"})
    assert caught.value.key == f"cluster.env.{secret.VARIABLE}"
    assert "hunter2" not in str(caught.value)
