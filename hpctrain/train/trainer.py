"""Train one attempt: build, resume, loop, conclude."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

from hpctrain.attempt.lost_gpu import closing_unless_lost
from hpctrain.checkpoint.read import prepare_resume
from hpctrain.config.root import Config
from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.errors import ConfigError
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.rank.determinism import rank_seed, seed_everything
from hpctrain.run.bottleneck import last_bottleneck
from hpctrain.run.directory import RunDirectory
from hpctrain.train.checkpointing import Checkpointing, Start
from hpctrain.train.divergence import Divergence
from hpctrain.train.loop import AttemptContext, Loop
from hpctrain.train.profiling.profiler import Profiler
from hpctrain.train.start_table import log_start
from hpctrain.train.training import Training, build
from hpctrain.train.training_log import TrainingLog, cut_sample_logs, log_samples
from hpctrain.train.update import unknown_optimizers_refused


def train(
    config: Config,
    world: TrainingWorld,
    attempt: AttemptContext,
    started: Callable[[Loop], None] = lambda _: None,
) -> bool:
    """Train one attempt of a run, on this rank; collective.

    Args:
        config: of the run.
        world: the ranks.
        attempt: in which it trains.
        started: called with the loop once the training is resumed, before its first step.

    Returns:
        Whether the run is complete; if not, the ranks stopped, or the run paused, and it is saved if there was time.

    Raises:
        TaskError: the task broke its contract.
        ConfigError: a key doesn't fit the task, or the evaluation doesn't return what `checkpoint.metric` names.
        CheckpointError: the run can't be resumed, or saved.
        SupersededError: a later attempt owns the run.
    """
    resumes = prepare_resume(attempt.directory, attempt.claim, world)
    training = build(config, world, resumes=resumes, stop=attempt.stopping.request, bar=attempt.bar)
    if training.evaluation is None:
        _refuse_without_evaluation(training)
    loop, loader = _resumed(training, attempt)
    started(loop)
    if attempt.hosts is not None:
        flops_per_sample = _counted_flops(attempt.directory, world)
        log_start(training, attempt.claim, step=loop.step, hosts=attempt.hosts, flops_per_sample=flops_per_sample)
    attempt.times.enter("first_step_s")
    # building and restoring may have taken long: a later attempt may own the metrics by now
    attempt.require_ownership(world)
    try:
        with attempt.sharing_terminal():
            return _run(loop, loader, attempt)
    finally:
        attempt.times.record(loop.step, due=True)


def _resumed(training: Training, attempt: AttemptContext) -> tuple[Loop, TrainLoader]:
    """Restore the newest checkpoint, and return the loop after it, and its loader; collective."""
    directory, stopping, world = attempt.directory, attempt.stopping, training.world
    # the training was built from the same numbers on all ranks; from here on each rank draws its own
    seed_everything(rank_seed(training.config.seed, world.share.random_stream))
    attempt.times.enter("load_s")
    saver = training.network.saver(directory, attempt.claim, training.checkpoint_policy, stopping.request)
    checkpointing = Checkpointing(training, directory, saver, agreement=stopping.agreement, claim=attempt.claim)
    show = None if attempt.bar is None else partial(attempt.bar.show, "reading the checkpoint", in_gb=True)
    with attempt.sharing_terminal():
        start = checkpointing.resume(show)
    loader = training.data.loader(start.step, training.data.stream_state.bookmarks)
    profiler = Profiler(
        training,
        loader,
        stopping.agreement,
        attempt.times,
        start_step=start.step,
        flops_per_sample=_counted_flops(directory, world),
        trace=directory.trace(world.rank) if world.is_rank_zero else None,
    )
    loop = Loop(
        training,
        attempt,
        start,
        profiler=profiler,
        log=TrainingLog(training, start, profiler, attempt.times),
        checkpointing=checkpointing,
        divergence=Divergence(training, directory, saver, start.step),
    )
    return loop, loader


def _run(loop: Loop, loader: TrainLoader, attempt: AttemptContext) -> bool:
    """Run the steps that remain, and save the last one; return whether the run is complete; collective."""
    training, saver = loop.training, loop.checkpointing.saver
    if not loop.start(try_out=_is_new_or_changed(loop.start_point, attempt.directory, training.world)):
        saver.finish()
        return False
    # the evaluation may have taken long as well
    attempt.require_ownership(training.world)
    with loop.log.opened(attempt.directory, attempt.log_stream, attempt.bar):
        # end the loading processes first: the last write can use their cores
        with (
            closing_unless_lost(_micro_batches(training, loader, attempt, loop.start_point)) as micro_batches,
            unknown_optimizers_refused(training.step.turns),
        ):
            finished = loop.run(micro_batches)
        saver.finish()
        loop.conclude(finished=finished)
    return finished


def _refuse_without_evaluation(training: Training) -> None:
    """Refuse settings that need an evaluation, and warn of callbacks that do."""
    why = "nothing is evaluated: the task has no eval_dataset"
    keep_best = training.config.checkpoint.keep_best
    if keep_best:
        raise ConfigError("checkpoint.keep_best", keep_best, why, "set it to 0")
    for rate in (update.learning_rate for update in training.step.updates):
        if rate.followed is not None:
            remedy = "choose another schedule, such as cosine"
            raise ConfigError(rate.key, "plateau", why, remedy)
    training.callbacks.require_evaluation(why, warns=training.world.is_rank_zero)


def _counted_flops(directory: RunDirectory, world: TrainingWorld) -> float | None:
    """Return the FLOPs per sample that an earlier attempt counted, on rank zero; otherwise None."""
    before = last_bottleneck(directory) if world.is_rank_zero else None
    return None if before is None else before.flops_per_sample


def _is_new_or_changed(start: Start, directory: RunDirectory, world: TrainingWorld) -> bool:
    """Whether the run is new, or resumes with another configuration; collective."""
    return start.step == 0 or bool(world.broadcast(directory.config_before.exists()))


def _micro_batches(
    training: Training, loader: TrainLoader, attempt: AttemptContext, start: Start
) -> Generator[MicroBatch, None, None]:
    world = training.world
    directory = attempt.directory
    position = training.position
    # a stop while loading saves the step before: a before_step hook has already run, and may have changed its state
    loading = None
    if not training.callbacks.hooks["before_step"]:
        loading = attempt.stopping.agreement.loading_stop(lambda: f"step/{position.step}")
    micro_batches = loader.micro_batches(training.data.transfer, loading)
    if training.data.loss_weights.vary:
        micro_batches = training.data.loss_weights.of_steps(micro_batches)
    if not training.config.logger.samples or not world.share.is_counted:
        return micro_batches
    if world.is_rank_zero:
        cut_sample_logs(directory, range(0, world.size, world.share.num_together), start.step)
    return log_samples(micro_batches, directory.sample_log(world.rank), start.step)
