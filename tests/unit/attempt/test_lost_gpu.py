from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hpctrain.attempt import lost_gpu
from hpctrain.attempt.lost_gpu import closing_unless_lost, has_lost_gpu, retain_if_gpu_lost, with_cuda_message
from hpctrain.rank.classification import Classification, classify
from hpctrain.run.reason import Reason

LOST = torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable")
OF_LIBRARY = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`")


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process that has its GPU."""
    monkeypatch.setattr(lost_gpu, "_is_lost", False)


@pytest.fixture
def device(monkeypatch):
    """Makes torch have a GPU that answers, or raises."""

    def answer(error=None):
        def query():
            if error is not None:
                raise error
            return False

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))

    return answer


class Tensor:
    """Something that must not be freed."""


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
    ],
)
def test_these_errors_show_that_the_gpu_is_lost(error):
    assert retain_if_gpu_lost(error)
    assert has_lost_gpu()
    assert retain_if_gpu_lost(ValueError("later")), "it stays lost"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: device-side assert triggered, said a log"),
        RuntimeError("CUDA error: device-side assert triggered, said a log"),
        RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: invalid argument"),
        OF_LIBRARY,
        KeyboardInterrupt(),
    ],
)
def test_after_these_errors_the_gpu_still_answers(error, device):
    for _ in "once without a GPU, and once with one":
        assert not retain_if_gpu_lost(error)
        device()
    assert not has_lost_gpu()


BROKEN = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


@pytest.mark.parametrize("error", [BROKEN, OF_LIBRARY, ValueError("no luck"), KeyboardInterrupt()])
def test_a_gpu_that_does_not_answer_is_lost_whatever_the_error(error, device):
    device(torch.AcceleratorError("CUDA error: the launch timed out and was terminated"))
    assert retain_if_gpu_lost(error)


def test_what_a_library_noticed_is_named_as_cuda_names_it(device):
    noticed = RuntimeError("GET was unable to find an engine to execute this computation")
    device(LOST)
    named = with_cuda_message(noticed)
    assert str(named) == f"CUDA error: device-side assert triggered; noticed by RuntimeError: {noticed}"
    assert named.__cause__ is noticed
    assert classify(named, world_size=1) == Classification(Reason.FAILED)
    device(BROKEN)
    assert classify(with_cuda_message(OF_LIBRARY), world_size=1) == Classification(Reason.INFRASTRUCTURE)
    assert with_cuda_message(LOST) is LOST
    device()
    assert with_cuda_message(noticed) is noticed


def failed(error, *, holding):
    """The error, after a function that holds something has raised it."""

    def compute(held):
        raise error

    try:
        compute(holding)
    except BaseException as raised:
        return raised


def test_what_the_error_holds_and_what_is_named_is_never_freed():
    in_frame, named = Tensor(), Tensor()
    alive = weakref.WeakSet([in_frame, named])
    error = failed(torch.AcceleratorError(str(LOST)), holding=in_frame)
    assert retain_if_gpu_lost(error, named)
    del in_frame, named, error
    gc.collect()
    assert len(alive) == 2


def test_what_another_error_holds_is_freed():
    in_frame, named = Tensor(), Tensor()
    alive = weakref.WeakSet([in_frame, named])
    error = failed(ValueError("no luck"), holding=in_frame)
    assert not retain_if_gpu_lost(error, named)
    del in_frame, named, error
    gc.collect()
    assert not alive


@pytest.mark.parametrize(("error", "closes"), [(None, True), (ValueError("no luck"), True), (LOST, False)])
def test_batches_are_closed_unless_the_gpu_is_lost(error, closes):
    closed = []

    def batches():
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    def use():
        with closing_unless_lost(batches()) as given:
            assert next(given) == 1
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(type(error)):
            use()
    gc.collect()
    assert closed == [True] * closes
