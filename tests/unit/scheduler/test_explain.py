import pytest

from hpctrain.scheduler.explain import explain_pending


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "nodes to become free"),
        ("(Resources)", "nodes to become free"),
        ("Priority", "higher priority"),
        ("Dependency", "another job"),
        ("BeginTime", "two minutes"),
        ("JobArrayTaskLimit", "cluster.max_parallel_runs"),
        ("PartitionTimeLimit", "cluster.time_limit_min"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "UnavailableNodes:n[1-2]"),
        ("ReqNodeNotAvail,_UnavailableNodes:n[1-2]", "drained"),
        ("QOSMaxJobsPerUserLimit", "your jobs have as many running jobs as its quality of service allows"),
        ("QOSGrpNodeLimit", "all users together have as many nodes"),
        ("QOSMaxGRESPerUser", "as many GPUs"),
        ("QOSMinGRES", "fewer GPUs"),
        ("QOSMaxWallDurationPerJobLimit", "more time than its quality of service allows to one job"),
        ("QOSMaxCpuMinutesPerJobLimit", "more CPU cores times time than"),
        ("QOSJobLimit", "running jobs"),
        ("AssocGrpCPUMinutesLimit", "its account has used up its budget of CPU cores times time"),
        ("AssocGrpCPURunMinutesLimit", "remaining time of the running jobs"),
        ("AssocGrpMemLimit", "as much memory as its account allows"),
        ("AssocMaxSubmitJobLimit", "many submitted jobs"),
        ("AssociationJobLimit", "running jobs"),
        ("None", "hasn't considered"),
        ("", "hasn't considered"),
        ("SomethingNew", "SLURM gives the reason SomethingNew"),
    ],
)
def test_plain_words(reason: str, words: str) -> None:
    text = explain_pending(reason)
    assert words in text
    assert "\n" not in text


def test_slurms_own_word_is_kept_for_a_search() -> None:
    assert explain_pending("AssocGrpGRES").endswith("(AssocGrpGRES)")
    assert explain_pending("Resources").endswith("(Resources)")
