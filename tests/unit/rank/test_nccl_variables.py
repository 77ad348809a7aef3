from __future__ import annotations

import pytest

from hpctrain.config.health import Health
from hpctrain.rank.group import nccl_defaults, set_nccl_variables, user_nccl_variables

HANDLING, RETHROW = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


def test_torch_leaves_errors_to_hpctrain():
    environ = {"HOME": "/home/me"}
    set_nccl_variables(environ, 100)
    assert environ == {
        "HOME": "/home/me",
        HANDLING: "0",
        RETHROW: "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        HEARTBEAT: "160",
    }
    assert user_nccl_variables(environ, 100) == {}


@pytest.mark.parametrize("bound_s", [10, 1800, 7200])
def test_torchs_watchdog_waits_longer_than_any_bound_of_hpctrain(bound_s):
    health = Health(hang_timeout_s=bound_s, save_timeout_s=2 * bound_s)
    assert int(nccl_defaults(health.collective_timeout_s)[HEARTBEAT]) > health.collective_timeout_s > 2 * bound_s


def test_a_bound_of_four_months_fits_into_torchs_milliseconds():
    health = Health(start_timeout_s=1e7)
    assert int(nccl_defaults(health.collective_timeout_s)[HEARTBEAT]) * 1000 < 2**31


@pytest.mark.parametrize(
    "users", [{HANDLING: "3"}, {RETHROW: "1", HEARTBEAT: "60"}, {"NCCL_ASYNC_ERROR_HANDLING": "1"}], ids=str
)
def test_what_the_user_set_is_kept_and_reported(users):
    environ = dict(users)
    set_nccl_variables(environ, 100)
    assert user_nccl_variables(environ, 100) == users
    assert {name: environ[name] for name in users} == users
    assert ("NCCL_ASYNC_ERROR_HANDLING" in users) == (HANDLING not in environ)


def test_torchruns_own_value_is_not_the_users():
    environ = {HANDLING: "1", "TORCHELASTIC_RUN_ID": "none"}
    assert user_nccl_variables(environ, 100) == {}
    set_nccl_variables(environ, 100)
    assert environ[HANDLING] == "0"
    assert user_nccl_variables({HANDLING: "1"}, 100) == {HANDLING: "1"}
    assert user_nccl_variables({HANDLING: "2", "TORCHELASTIC_RUN_ID": "none"}, 100) == {HANDLING: "2"}
