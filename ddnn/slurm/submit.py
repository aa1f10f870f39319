"""`ddnn train --slurm` and `ddnn pretrain --slurm`: checks what can be checked now, writes the script, submits it; several
seeds as an array of jobs. A script is a pure function of a JobScript."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from ddnn.distributed.mpirun import IGNORING_SIGUSR1, MPI_SETTINGS
from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import Recipe, TrainedModelConfig
from ddnn.runs import run_status as files
from ddnn.runs.run_status import Resume, check_run_dir
from ddnn.runs.tensorboard import import_tensorboard
from ddnn.slurm.cluster import ClusterConfig, Placement, check_word, load_cluster, parse_time_limit, place
from ddnn.slurm.job import Job, NoAnswerError, SbatchError, read_job, sbatch, slurm_state, write_job
from ddnn.slurm.options import Seeds, SlurmOptions
from ddnn.training.command import ALLOW_PIPES, TrainingCommand
from ddnn.training.start import check_resume, makes_longer, read_recipe
from ddnn.util.errors import UserError
from ddnn.util.files import ensure_directory, is_locked, write_text
from ddnn.util.process import python_command
from ddnn.util.text import environment, plural, render


@dataclass(frozen=True)
class Submitted:
    """What was submitted: the job's `number`, None of a dry run, and a `text` to show: of a dry run the script."""

    number: str | None
    text: str


def submit(
    command: TrainingCommand,
    options: SlurmOptions,
    *,
    seeds: Seeds | None = None,
    dry_run: bool = False,
    after: str | None = None,
) -> Submitted:
    """Submits the training of a recipe, or its pretraining alone. A dry run only makes the script. UserError: anything
    that is wrong with the recipe, the settings or the run dir, or sbatch refused the job.

    The job trains by the recipe as it is now, resolved, from the run dir: later changes of the file do not count. A
    pretraining resumes one in the run dir that was interrupted. The number of workers is that of the command, else of
    the nodes, the cluster or the recipe. The device `auto` becomes cuda where the job has GPUs, so that a broken one is
    noticed, and cpu where it has none.

    `seeds`: train with each of these, as one array: task N trains seed N in RUN_DIR-seedN, by a script of its own there,
    so that it can also be submitted alone. Those that a resume finds finished are not submitted. `after`: number of a
    job that must have ended well first. Where it does not, Slurm cancels this one.
    """
    finished, commands = "", {0: command}
    if seeds is not None:
        commands = seeds.commands(command)
        over = [seed for seed, each in commands.items() if each.resume != "no" and _is_over(each)]
        finished = "".join(f"\nseed {seed} has finished: {commands.pop(seed).location}" for seed in over)
        if not commands:
            return Submitted(None, finished.strip())
        seeds = replace(seeds, numbers=tuple(commands))
    array_of = None if seeds is None else command.location
    plans = [_plan(each, options, array_of) for each in commands.values()]
    jobs, scripts = [job for job, _ in plans], [script_text(job) for job, _ in plans]
    script = scripts[0] if seeds is None else array_text(jobs[0], seeds)
    if dry_run:
        if seeds is not None:
            script += f"\n# The script of task {seeds.numbers[0]}, {jobs[0].run_dir / files.JOB_SCRIPT}:\n{scripts[0]}"
        return Submitted(None, script.rstrip("\n"))
    for (job, recipe), planned in zip(plans, commands.values(), strict=True):
        _check(job, recipe, planned)
    chosen = sbatch_options(jobs[0], seeds)
    if after is not None:
        # Not in the script: by the time somebody submits it again by hand, Slurm has forgotten the other job.
        chosen += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    with _removed_if_refused(jobs):
        for (job, recipe), text in zip(plans, scripts, strict=True):
            _write(job, recipe, text, command.resume)
        number, slurm_cluster = sbatch(chosen, jobs[0].run_dir / files.JOB_SCRIPT if seeds is None else script)
    numbers = [number] if seeds is None else [f"{number}_{seed}" for seed in seeds.numbers]
    for job, own in zip(jobs, numbers, strict=True):
        _record(job, own, slurm_cluster, options.as_words(command))
    text = render("submitted.txt.j2", number=number, numbers=numbers, jobs=jobs, shortest=_shortest, files=files)
    return Submitted(number, text + finished)


def _is_over(command: TrainingCommand) -> bool:
    """Whether a training has finished, and is not asked for more epochs."""
    return files.is_finished(command.location) and not makes_longer(command, read_recipe(command))


def _plan(command: TrainingCommand, options: SlurmOptions, array_of: Path | None = None) -> tuple[JobScript, Recipe]:
    """The job and the recipe that it trains by. Writes nothing. `array_of`: what the run dirs of an array begin with."""
    run_dir, pretraining, cluster = command.location, command.kind == "pretraining", _cluster(options, command.workers)
    parallel = read_recipe(replace(command, workers=None)).parallel
    placement = place(cluster, command.workers, parallel.workers, parallel.oversubscribe_gpus)
    recipe = read_recipe(replace(command, workers=placement.workers))
    if isinstance(recipe.init, TrainedModelConfig):
        from ddnn.training.initial_model import with_initial_model

        recipe, _ = with_initial_model(recipe, run_dir if command.resume != "no" else None)
    if recipe.model.layers is not None:
        from ddnn.training.options import check_layers_fit

        check_layers_fit(recipe)
    if recipe.log.tensorboard and not cluster.container:  # which has packages of its own
        import_tensorboard()
    dbn = recipe.pretrain.dbn if recipe.init == "rbm" and files.newest_checkpoint(run_dir) is None else None
    if dbn is not None and (dbn.is_file() or (dbn / files.DBN).is_file()):  # else another job will have made it
        from ddnn.training.pretraining import load_dbn

        load_dbn(recipe, dbn)
    if pretraining:
        from ddnn.training.options import check_pretrains

        check_pretrains(recipe)
    run_dir = Path(os.path.abspath(run_dir))  # noqa: PTH100 (resolve() would follow links, which may be meant)
    job = JobScript(
        run_dir=run_dir,
        training=_training_command(command, run_dir, recipe, cluster, placement),
        name=_job_name(options.job_name, array_of or run_dir),
        placement=placement,
        threads=recipe.parallel.cpu_threads,
        cluster=cluster,
        pretraining=pretraining,
        of_array=array_of is not None,
        trains=f"{recipe.model.summary()}, seed {recipe.seed}",
    )
    return job, recipe


def _check(job: JobScript, recipe: Recipe, command: TrainingCommand) -> None:
    """UserError where the job would be refused, or would disturb another. Changes nothing."""
    run_dir = job.run_dir
    if shutil.which("sbatch") is None:
        message = "sbatch is not found on PATH: is this a login node of a Slurm cluster?"
        raise SbatchError(message, hint="run it there, or see the script with --dry-run; nothing was written")
    if not job.pretraining and is_locked(run_dir / files.LOG) is True:
        raise UserError("another run is in progress in this run dir", location=run_dir)
    before = read_job(run_dir)
    state = None if before is None else slurm_state(before)
    if before is not None and state is not None and state.name != "GONE":
        hint = f"wait for it, or end it with `scancel {before.number}`, or name another --run-dir"
        raise UserError(f"job {before.number} of this run dir is {state.name}", location=run_dir, hint=hint)
    if job.pretraining:
        if (run_dir / files.DBN).exists():
            hint = f"take it by pretrain.dbn: {run_dir}"
            raise UserError("this pretraining has finished", location=run_dir, hint=hint)
        check_run_dir(run_dir, "pretraining", recipe=_pretraining_recipe(recipe))
    elif command.resume != "no":  # so that the job refuses nothing hours later
        check_run_dir(run_dir, resume=True)
        files.refuse_lost_checkpoints(run_dir)
        if _is_over(command):
            raise UserError("this training has finished", location=run_dir, hint="name another --run-dir")
        if not files.is_finished(run_dir):
            check_resume(recipe, run_dir)
    else:
        check_run_dir(run_dir)


def _write(job: JobScript, recipe: Recipe, text: str, resume: Resume) -> None:
    """The run dir with what the job needs."""
    run_dir = job.run_dir
    ensure_directory(run_dir)
    if job.pretraining:
        write_text(run_dir / files.RECIPE, _pretraining_recipe(recipe))
    elif resume == "no":  # what a job has left that ended before its training began
        for name in (files.JOB_RECORD, files.JOB_OUTPUT, files.LOG, files.STATUS):
            (run_dir / name).unlink(missing_ok=True)
    write_text(run_dir / _JOB_RECIPES["pretraining" if job.pretraining else "training"], dump_recipe(recipe))
    write_text(run_dir / files.JOB_SCRIPT, text)


@contextmanager
def _removed_if_refused(jobs: Sequence[JobScript]) -> Iterator[None]:
    """Removes the run dirs of jobs that did not exist before where one cannot be written or sbatch refuses the job."""
    new = [job.run_dir for job in jobs if not job.run_dir.exists()]
    try:
        yield
    except UserError as error:
        if not isinstance(error, NoAnswerError):  # then the job may be there
            for run_dir in new:
                shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _record(job: JobScript, number: str, slurm_cluster: str | None, options: tuple[str, ...]) -> None:
    workers, nodes = job.placement.workers, job.placement.nodes
    write_job(job.run_dir, Job(number, slurm_cluster, time.time(), workers, nodes, job.cluster.launcher, options))


_JOB_RECIPES = {"training": files.RECIPE, "pretraining": files.JOB_RECIPE}  # the recipe that the job reads


def _training_command(
    command: TrainingCommand, run_dir: Path, recipe: Recipe, cluster: ClusterConfig, placement: Placement
) -> tuple[str, ...]:
    """The command that trains: from what is in the run dir when the job begins, or begins again. data.allow_pipes: the
    user's word, which the recipe in the run dir is not."""
    device = ("cuda" if placement.gpus_per_node else "cpu") if command.device == "auto" else command.device
    in_job = TrainingCommand(
        command.kind,
        run_dir / _JOB_RECIPES[command.kind],
        run_dir,
        (ALLOW_PIPES,) if recipe.data.allow_pipes else (),
        placement.workers,
        device,
        "auto" if command.kind == "training" else "no",
    )
    interpreter, *words = python_command("ddnn.cli", *in_job.arguments())
    return ("python3" if cluster.container else interpreter, *words)


def _pretraining_recipe(recipe: Recipe) -> str:
    from ddnn.training.pretraining import pretraining_recipe

    return pretraining_recipe(recipe)


def _shortest(path: Path) -> str:
    """For a shell, as short as it can be named from here."""
    return shlex.quote(min(os.path.relpath(path), str(path), key=len))


def _cluster(options: SlurmOptions, workers: int | None) -> ClusterConfig:
    """The settings with the command line's options over them. Its --workers overrides the file's number of nodes."""
    cluster = load_cluster(options.cluster) if options.cluster else ClusterConfig()
    settings = {**cluster.model_dump(), **options.settings}
    settings["options"] = [*cluster.options, *options.settings.get("options", ())]  # of several, sbatch takes the last
    if workers is not None:
        settings["nodes"] = options.settings.get("nodes")
    if "gpus_per_node" in options.settings and "workers_per_node" not in options.settings:
        settings["workers_per_node"] = None if options.settings["gpus_per_node"] else cluster.workers_per_node
    try:
        cluster = ClusterConfig.model_validate(settings, strict=True)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        name = str(detail["loc"][0])
        message = f"{detail['input']!r} found: {detail['msg'].removeprefix('Value error, ')}"
        hint = " ".join((ClusterConfig.model_fields[name].description or "").split())
        name = "sbatch-option" if name == "options" else name.replace("_", "-")
        raise UserError(message, location=f"--{name}", hint=hint) from error
    if cluster.container and cluster.launcher != "srun":
        message = "a container needs launcher: srun, since the mpirun in it cannot start workers on other nodes"
        raise UserError(message, location=f"--cluster {options.cluster}", hint="add launcher: srun to the file")
    # Else Slurm would ask for the checkpoint as soon as the job begins, and so again and again.
    if cluster.time is not None and parse_time_limit(cluster.time) <= cluster.signal_seconds:
        message = (
            f"{cluster.time} found: no time to train, with the checkpoint {cluster.signal_seconds} s before the end"
        )
        hint = "give more time, or lower signal_seconds in the cluster's settings"
        raise UserError(message, location="--time", hint=hint)
    return cluster


def _job_name(given: str | None, run_dir: Path) -> str:
    if given is None:
        return "ddnn-" + re.sub(r"[^A-Za-z0-9_.-]+", "_", run_dir.name)
    try:
        return check_word(given)
    except ValueError as error:
        hint = "take letters, digits, - and _"
        raise UserError(f"{given!r} found: {error}", location="--job-name", hint=hint) from error


@dataclass(frozen=True)
class JobScript:
    """A training as a job: everything that its script says."""

    run_dir: Path  # absolute; the job's output goes into it
    training: tuple[str, ...]  # the command that trains, word by word, with absolute paths only
    name: str  # the job's name, one word
    placement: Placement  # workers over nodes
    threads: int  # CPU threads of each worker
    # settings of the cluster; of its numbers of nodes, workers and GPUs `placement` is the last word
    cluster: ClusterConfig
    pretraining: bool = False  # whether it is one
    of_array: bool = False  # whether it may run as a task of an array
    trains: str = ""  # for the reader of the script: network and seed

    @property
    def summary(self) -> str:
        """For the reader of the script."""
        limit = f", {self.cluster.time} at most" if self.cluster.time else ""
        return f"{self.placement}{limit}" + (f"; {self.trains}" if self.trains else "")

    @property
    def cpus_per_worker(self) -> int:
        return max(self.threads, self.cluster.cpus_per_worker)


def sbatch_options(job: JobScript, seeds: Seeds | None = None) -> list[str]:
    """Options of sbatch, each one word, unquoted: for its command line, where they win over SBATCH_* variables.
    `seeds`: of an array of such jobs, of which this is the first. UserError: the run dir's name holds what Slurm cannot
    write to."""
    cluster, placement = job.cluster, job.placement
    gpus = placement.gpus_per_node
    folder = str(job.run_dir)
    if unfit := next((c for c in folder if c == "\\" or not c.isprintable()), None):
        message = f"the name of the run dir holds {unfit!r}, which Slurm cannot have in the name of an output file"
        raise UserError(message, location=repr(folder), hint="name another --run-dir")
    folder = folder.replace("%", "%%")  # Slurm replaces what follows %; two of them are one
    if seeds is not None:
        folder = folder.removesuffix(str(seeds.numbers[0])) + "%a"
    chosen = {
        "array": seeds,
        "job-name": job.name,
        "output": f"{folder}/{files.JOB_OUTPUT}",
        "open-mode": "append",  # a job that was requeued continues the same file
        "requeue" if cluster.requeue else "no-requeue": "",
        "signal": f"B:USR1@{cluster.signal_seconds}" if cluster.signal_seconds else None,
        **{name: getattr(cluster, name) for name in ("partition", "account", "qos", "constraint", "time")},
        "nodes": placement.nodes,
        "ntasks-per-node": placement.workers_per_node,
        "cpus-per-task": job.cpus_per_worker,
        "gres": ":".join(filter(None, ("gpu", cluster.gpu_type, str(gpus)))) if gpus else None,
        "mem": cluster.mem,
    }
    words = [f"--{name}={value}".removesuffix("=") for name, value in chosen.items() if value is not None]
    return [*words, *cluster.options]


def array_text(job: JobScript, seeds: Seeds) -> str:
    """The script of an array of jobs like `job`, which is its first: it runs that of the task."""
    return _script(
        "array.sh.j2",
        sbatch_options=sbatch_options(job, seeds),
        summary=f"{plural(len(seeds.numbers), 'job')}, each {job.placement}",
        prefix=_one_line(str(job.run_dir).removesuffix(str(seeds.numbers[0]))),
        script=files.JOB_SCRIPT,
    )


def script_text(job: JobScript) -> str:
    """The whole script. UserError: a name holds what neither Slurm nor one line of shell can."""
    # Else ddnn itself starts mpirun, on the nodes of the allocation.
    container = job.cluster.container
    by_srun = job.cluster.launcher == "srun" and (job.placement.workers > 1 or bool(container))
    pyxis = bool(container) and container[0].startswith("-")
    return _script(
        "job.sh.j2",
        job=job,
        run_dir=str(job.run_dir),
        sbatch_options=sbatch_options(job),
        by_srun=by_srun,
        mpi_settings={name: value for name, value in MPI_SETTINGS.items() if by_srun and "MCA" in name},
        environment={"SLURM_EXPORT_ENV": "ALL", "OMP_NUM_THREADS": str(job.threads), **job.cluster.environment},
        command=[
            *(container if pyxis else ()),
            *(IGNORING_SIGUSR1 if by_srun else ()),
            *(() if pyxis else container),
            *map(_one_line, job.training),
        ],
        checkpoints=files.CHECKPOINTS,
    )


def _script(template: str, **values: object) -> str:
    """Values are written as they are, but for the quotes: a path may hold any byte."""
    templates = environment().overlay(finalize=None)
    templates.filters = {**templates.filters, "sbatch_quote": _sbatch_quote}
    return templates.get_template(template).render(values)


def _sbatch_quote(option: str) -> str:
    """An option for an #SBATCH line. sbatch reads double quotes and backslashes in them as a shell would, no $."""
    if not re.search(r"[\s\"'#]", option):
        return option
    name, _, value = option.partition("=")
    escaped = value.replace('"', '\\"')
    return f'{name}="{escaped}"'


def _one_line(text: str) -> str:
    if unfit := re.search(r"[\n\r\0]", text):
        message = f"{unfit[0]!r} found, which cannot be in a job script"
        raise UserError(message, location=repr(text), hint="rename the file")
    return text
