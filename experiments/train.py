"""One training run: the update, the evaluation, and the loop that starts it or takes it up again.

What a step reads (batch, dropout key, rates) is a function of the configuration, the corpus and the step's
number, so that a run killed at any moment and started again ends like one that was never killed.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from experiments.checkpoints import Checkpoints
from experiments.config import Run, Status
from experiments.corpus import Corpus, load, train_batches, validation_batches
from experiments.devices import ONE, Devices, Layout, layout
from experiments.files import RESULT, check_config, check_corpus, locked, read_json, write_config, write_json
from experiments.hosts import first_then_others, is_first
from experiments.loggers import import_wandb
from experiments.metrics import RunEnded, RunLog, Update
from experiments.model import GPT2, init_params
from experiments.optimizers import (
    learning_rate_schedule,
    make_optimizer,
    prepare_params,
    solver_diagnostics,
)
from experiments.preemption import Preempted, notice
from experiments.probes import make_probe, make_size_probe
from sel_jax import effective


class TrainState(NamedTuple):
    """All that changes from one update to the next."""

    params: Any
    opt_state: Any
    step: Array
    """Completed updates, an int32 scalar."""


@dataclass(frozen=True)
class Result:
    """How a run ended: the contents of its `result.json`."""

    status: Status
    step: int
    """Completed updates; for `diverged` and `non-finite`, the first at which it showed."""
    reason: str
    validation_loss: float | None
    """Of the last evaluation; None where it was not finite."""
    best_validation_loss: float | None


def init_state(config: Run, optimizer: optax.GradientTransformation, params: Any | None = None) -> TrainState:
    """The state before the first update: a function of the configuration alone, or of ordinary params too."""
    if params is None:
        params = init_params(config.model, jax.random.key(config.seed))
    params = prepare_params(params, config)
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def mean_loss(model: GPT2, params: Any, tokens: Array, dropout_key: Array | None = None) -> Array:
    """Cross entropy (nats a token) of tokens (B, T + 1): each of the last T, given those before it.

    Reparametrised params are taken at their effective weights.
    """
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    variables = {"params": effective(params)}
    logits = model.apply(variables, tokens[:, :-1], deterministic=rngs is None, rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_train_step(
    config: Run, optimizer: optax.GradientTransformation, where: Layout | None = None
) -> Callable[[TrainState, Array], tuple[TrainState, Update]]:
    """The compiled update: (state, tokens (batch, context + 1)) -> (state, what is recorded).

    The state's buffers are donated. The gradient is the mean over `config.data.accumulation`
    micro-batches, computed one after the other.

    Args:
      config: of the run.
      optimizer: its optimizer.
      where: the layout of its arguments over devices; None compiles it for wherever they lie.
    """
    loss_and_gradient = jax.value_and_grad(functools.partial(mean_loss, GPT2(config.model)))
    schedule = learning_rate_schedule(config)
    count, axis_name = config.data.accumulation, None if where is None else where.axis_name

    def train_step(state: TrainState, tokens: Array) -> tuple[TrainState, Update]:
        def accumulate(total: Any, micro_batch: tuple[Array, Array | None]) -> tuple[Any, None]:
            return optax.tree.add(total, loss_and_gradient(state.params, *micro_batch)), None

        keys = None  # Without dropout the compiled step does not hold the seed: a cache serves all seeds.
        if config.model.dropout:
            key = jax.random.fold_in(jax.random.key(config.seed), state.step)
            if axis_name is not None:
                key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
            keys = jax.random.split(key, count)
        # Every count-th sequence, so that a batch that is divided among devices stays where it is.
        micro_batches = tokens.reshape(-1, count, tokens.shape[-1]).swapaxes(0, 1), keys
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
        total, _ = jax.lax.scan(accumulate, zeros, micro_batches)
        loss, gradient = jax.tree.map(lambda x: x / count, total)
        if axis_name is not None:
            loss, gradient = jax.lax.pmean((loss, gradient), axis_name)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        update = Update(loss, optax.tree.norm(gradient), jnp.asarray(schedule(state.step), jnp.float32))
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), update

    return jax.jit(train_step, donate_argnums=0) if where is None else where.compiled(train_step)


def make_evaluation(config: Run, corpus: Corpus, where: Layout) -> Callable[..., dict[str, Any]]:
    """A function (params, sizes=False) that gives, on fixed held-out text, what an `eval` line records.

    That is the mean `loss`, and `attention` and `weights` from `probes.make_probe`; with `sizes`, `weights`
    has what `probes.make_size_probe` finds too.
    """
    batches = np.stack(
        validation_batches(
            corpus,
            batch_size=config.data.batch_size,
            context=config.model.context,
            count=config.data.eval_batches,
        )
    )
    sequences = batches.reshape(-1, batches.shape[-1])[: config.data.probe_sequences, :-1]
    # In micro-batches, as in training, since a whole batch's logits may not fit.
    batches = batches.reshape(-1, config.data.batch_size // config.data.accumulation, batches.shape[-1])
    batches, sequences = where.evaluated(batches, axis=1), where.evaluated(sequences)
    loss, probe = functools.partial(mean_loss, GPT2(config.model)), make_probe(config)
    evaluate = jax.jit(lambda params, batches: jax.lax.map(lambda x: loss(params, x), batches).mean())
    size_probe = make_size_probe(config)

    def evaluation(params: Any, sizes: bool = False) -> dict[str, Any]:
        found = where.read({"loss": evaluate(params, batches), **probe(params, sequences)})
        for name, numbers in where.read(size_probe(params)).items() if sizes else ():
            found["weights"][name].update(numbers)
        return found

    return evaluation


def _solver(state: TrainState, where: Layout) -> dict[str, Any]:
    """What an `eval` line records of the last step's solver; nothing where there is none."""
    found = where.read(solver_diagnostics(state.opt_state))
    return {"solver": found} if found else {}


class Program(NamedTuple):
    """A run's functions; each is compiled at its first call. States are laid out as `where` says."""

    where: Layout
    abstract_state: TrainState
    """Shapes and dtypes of one copy."""
    initial_state: Callable[[], TrainState]
    train_step: Callable[[TrainState, Array], tuple[TrainState, Update]]
    evaluate: Callable[..., dict[str, Any]]


def make_program(config: Run, corpus: Corpus, devices: Devices = ONE) -> Program:
    """The functions of a run on a text.

    Raises:
      InputError: the optimizer is unknown, the text is too short for one batch, or a batch cannot be divided
        among the devices.
    """
    where = layout(devices, config)
    optimizer = make_optimizer(config, where.axis_name)
    init = functools.partial(init_state, config, optimizer)
    return Program(
        where,
        jax.eval_shape(init),
        functools.partial(where.initial, init),
        make_train_step(config, optimizer, where),
        make_evaluation(config, corpus, where),
    )


def train(
    config: Run,
    run_dir: Path,
    *,
    corpus: Corpus | None = None,
    devices: Devices = ONE,
    progress: bool = True,
    wandb: str | None = None,
) -> Result:
    """Starts a run, takes up one that was interrupted, or returns the result of one that has ended.

    Args:
      config: the whole run.
      run_dir: the run's own folder: configuration, metrics, checkpoints and, at the end, `result.json`.
      corpus: the text; by default it is loaded as `config.data.corpus` says.
      devices: on which it is trained; it may go on on others.
      progress: show a progress bar on stderr.
      wandb: project at Weights & Biases that gets the metrics too, whatever an earlier start did.

    Raises:
      Preempted: SIGTERM came; what there is has been saved.
      InputError: the folder holds another configuration's run, or a run on another text; or the
        configuration or the corpus cannot be used, here or on these devices; or another process trains in
        the folder.
    """
    run_dir = Path(run_dir)
    if wandb is not None and is_first():
        import_wandb()
    check_config(config, run_dir)
    if corpus is None:
        corpus = load(config.data.corpus, vocab_size=config.model.vocab_size, context=config.model.context)
    check_corpus(corpus, run_dir)
    if (run_dir / RESULT).exists():
        return Result(**read_json(run_dir / RESULT))
    # This may reject the configuration, so it comes before the folder is made this configuration's own.
    program = make_program(config, corpus, devices)
    if is_first():
        write_config(config, corpus, run_dir)
    with locked(run_dir) if is_first() else nullcontext():
        return _run(config, run_dir, corpus, program, progress, wandb)


def _run(
    config: Run, run_dir: Path, corpus: Corpus, program: Program, progress: bool, wandb: str | None
) -> Result:
    def open_log() -> RunLog:
        # A checkpoint of step 0 is a given start, of which nothing is recorded yet.
        return RunLog(config, run_dir, checkpoints.latest_step or None, progress, is_first(), wandb)

    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        # Before the metrics are cut to the latest checkpoint: a damaged one is passed over.
        state = _saved(program, checkpoints)
        with first_then_others(open_log, "metrics") as log, notice() as told_to_stop:
            status, step, reason = "finished", config.steps, f"all {config.steps} updates were made"
            try:
                _loop(config, corpus, program, checkpoints, state, log, told_to_stop)
            except RunEnded as end:
                status, step, reason = end.status, end.step, end.reason
    result = Result(status, step, reason, log.validation_loss, log.best_validation_loss)
    # Last of all, so that whoever finds it finds the final checkpoint and all metrics too.
    if is_first():
        write_json(run_dir / RESULT, asdict(result))
    return result


def _saved(program: Program, checkpoints: Checkpoints) -> TrainState | None:
    if checkpoints.latest_step is None:
        return None
    return program.where.spread(checkpoints.restore(program.where.abstract(program.abstract_state)))


def _loop(
    config: Run,
    corpus: Corpus,
    program: Program,
    checkpoints: Checkpoints,
    state: TrainState | None,
    log: RunLog,
    told_to_stop: Callable[[int], bool],
) -> None:
    """Makes the updates that are missing.

    Raises:
      RunEnded: the run cannot go on.
      Preempted: it was told to stop, and the last update made is saved.
    """
    start, where = checkpoints.latest_step or 0, program.where
    if start == config.steps:
        return
    state = program.initial_state() if state is None else state
    if start == 0:
        log.evaluation(0, program.evaluate(where.whole(state).params, sizes=True))
    batches = train_batches(
        corpus,
        batch_size=config.data.batch_size,
        context=config.model.context,
        seed=config.seed,
        start_step=start,
        stop_step=config.steps,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    for step, tokens in enumerate(batches, start + 1):
        state, update = program.train_step(state, where.batch(tokens))
        log.update(step, update)
        last = step == config.steps
        evaluation_due = last or step % config.eval_every == 0
        stop = told_to_stop(step)
        save_due = last or stop or step % config.checkpoint_every == 0
        # The first step is read at once: what it took to compile is not counted as training time.
        if step == start + 1 or evaluation_due or save_due or step % config.log_every == 0:
            log.read()
        if evaluation_due:
            whole = where.whole(state)
            log.evaluation(step, {**program.evaluate(whole.params, sizes=last), **_solver(whole, where)})
        if save_due:
            log.flush()  # Before the save: what a checkpoint covers is never computed again.
            checkpoints.save(step, where.whole(state))
        if stop and not last:
            raise Preempted(step)
