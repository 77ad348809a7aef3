"""Ranks whose machines have different devices, before they make a process group."""

from __future__ import annotations

from hpctrain.launch.local import free_port, rank_variables
from hpctrain.launch.prepare import prepare
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

WORDS = ("trainer.max_steps=2", "logger.tensorboard=false")


def test_a_rank_with_a_broken_driver_ends_the_attempt_on_its_machine_and_not_on_the_cpu(
    fork_server, composer, tmp_path
):
    directory, port = RunDirectory.at(tmp_path / "R"), free_port()
    prepare(composer.compose([f"run_dir={directory.path}", *WORDS], world_size=2), WORDS)
    programs = ["command:rank", "command:rank_with_broken_driver"]
    numbers = [
        fork_server.start(program, str(directory.path), **rank_variables(rank, 2, port))
        for rank, program in enumerate(programs)
    ]
    zero, one = fork_server.wait(*numbers)
    assert [zero.code, one.code] == [1, 1], zero.output + one.output
    problem = "but the driver lists 1 GPU (CUDA error: system not yet initialized): run nvidia-smi or rocm-smi there"
    (line,) = [line for line in one.output.splitlines() if line.startswith("hpctrain: rank 1 on ")]
    assert problem in line
    assert "rank 0 on " in zero.output
    assert "lost another rank: torch finds no GPU on " in zero.output
    assert {
        rank: (record.reason, record.blames_peer) for rank, record in read_exit_records(directory.attempt(1)).items()
    } == {0: (Reason.INFRASTRUCTURE, True), 1: (Reason.INFRASTRUCTURE, False)}
    (attempt,) = Ledger(directory).attempts()
    assert attempt.reason is Reason.INFRASTRUCTURE
    assert attempt.detail.startswith("rank 1 on ")
    assert problem in attempt.detail
