"""Settings of a cluster: configs/cluster/*.yaml, or a file of one's own. Every key, its type and meaning."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from ddnn.errors import UserError
from ddnn.recipe.include import configs_folder, exists
from ddnn.recipe.schema import Count, Section
from ddnn.recipe.yaml_tree import Given, Problem, parse_file, read_file, shown

TIME = re.compile(r"\d+(:\d\d?){0,2}|\d+-\d\d?(:\d\d?){0,2}|UNLIMITED|INFINITE")
_OURS = (
    "--array", "--chdir", "--cpus-per-task", "--error", "--gres", "--job-name", "--no-requeue", "--nodes", "--ntasks",
    "--ntasks-per-node", "--open-mode", "--output", "--parsable", "--requeue", "--signal", "--test-only", "--wait",
    "--wrap",
)  # fmt: skip


def word(text: str) -> str:
    """`text` where it can stand in an #SBATCH line as one word; else ValueError."""
    if not text or not text.isprintable() or re.search(r"[\s\"'\\#]", text) or text.startswith("-"):
        raise ValueError("a space, a quote, a backslash, # or a control character, or a - at the beginning")
    return text


def time_limit(text: str) -> str:
    """`text` where Slurm reads it as a time; else ValueError."""
    if not TIME.fullmatch(text):
        raise ValueError("no time as Slurm writes it")
    return text


def seconds_of(text: str) -> float:
    """A time limit in seconds, inf where there is none: what `time_limit` takes."""
    if not text[0].isdigit():
        return math.inf
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:  # minutes, minutes:seconds
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def shell_line(text: str) -> str:
    """`text` where it is one line; else ValueError."""
    if "\n" in text or "\r" in text or "\0" in text:
        raise ValueError("a line break or a zero byte")
    return text


def option(text: str) -> str:
    """`text` where it is a long option of sbatch that ddnn does not set itself; else ValueError."""
    if not re.fullmatch(r"--[a-z][a-z-]*(=[^\s\"'\\#]+)?", text) or not text.isprintable():
        raise ValueError("expected --name or --name=value, without spaces and quotes")
    name = text.partition("=")[0]
    if any(ours.startswith(name) for ours in _OURS):  # sbatch takes a beginning for the whole
        raise ValueError("ddnn sets it itself")
    return text


Word = Annotated[str, AfterValidator(word)]
TimeLimit = Annotated[str, AfterValidator(time_limit)]
Line = Annotated[str, AfterValidator(shell_line)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Cluster(Section):
    """Settings of a cluster. Options of the command line win; what neither says is left to Slurm's own defaults."""

    partition: Word | None = None
    """Partition, or several with commas between."""
    account: Word | None = None
    """Account to charge."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that the nodes must have, as `sinfo -o %f` lists them."""
    time: TimeLimit | None = None
    """Time limit: minutes, HOURS:MM:SS, or DAYS-HOURS."""
    nodes: Count | None = None
    """Number of nodes; the command line's --workers puts it aside."""
    workers_per_node: Count | None = None
    """Workers on each node. Where it is not given: one for each GPU."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs on each node; 0 or not given: workers compute on CPU cores."""
    gpu_type: Word | None = None
    """Type of GPU, as `sinfo -o %G` names it: gpu:TYPE:4."""
    cpus_per_worker: Count = 1
    """CPU cores of each worker, at least `parallel.threads` of the recipe."""
    mem: Word | None = None
    """Memory on each node: 64G; 0 is all of it."""
    launcher: Literal["mpirun", "srun"] = "mpirun"
    """Who starts the workers: mpirun, by ddnn itself; or `srun --mpi=pmix`."""
    requeue: bool = True
    """Whether the job queues again, to go on, after Slurm's signal, the failure of a node, or preemption."""
    signal_seconds: Annotated[int, Field(ge=0, le=65535)] = 120
    """Seconds before the time limit at which Slurm asks for a checkpoint: time for a block of minibatches and the
    writing. Slurm may be a minute early. 0: it does not ask."""
    options: list[Annotated[str, AfterValidator(option)]] = Field(default_factory=list)
    """Further options of sbatch, one text each: --exclusive, --mail-type=END."""
    setup: list[Line] = Field(default_factory=list)
    """Lines of shell that run in the job before the training, as you wrote them: module load, activation of an
    environment. The first that fails ends the job."""
    environment: dict[VariableName, Line] = Field(default_factory=dict)
    """Environment variables of the job, set after `setup`."""


def load_cluster(name_or_file: str) -> Cluster:
    """The settings of a file, or of configs/cluster/NAME.yaml: first of the working directory, then of ddnn.

    Raises:
        UserError: there is none such, or something is wrong with it: all problems, one a line.
    """
    path = find_cluster(name_or_file)
    text, problems = read_file(path, str(path))
    values: Mapping[tuple[str, ...], Given] = {}
    if text is not None:
        values, more = parse_file(text, str(path))
        problems += more
    cluster = None if any(problem.unread for problem in problems) else _build(_by_key(values), problems)
    if cluster is not None and not problems:
        return cluster
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    listed = lines[0] if len(lines) == 1 else "".join(f"\n  - {line}" for line in lines)
    several = "" if len(lines) == 1 else f"{len(lines)} problems in the cluster's settings:"
    raise UserError(f"{several}{listed}", where=path)


def find_cluster(name_or_file: str) -> Path:
    """The file that `--cluster` means.

    Raises:
        UserError: there is none such.
    """
    as_file = Path(name_or_file)
    if exists(as_file) and not as_file.is_dir():
        return as_file
    folders = [Path("configs", "cluster"), configs_folder() / "cluster"]
    if re.fullmatch(r"[\w.-]+", name_or_file):
        for folder in folders:
            if exists(folder / f"{name_or_file}.yaml"):
                return folder / f"{name_or_file}.yaml"
    known = sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.yaml")})
    raise UserError(
        f"there is neither a file {name_or_file} nor settings of that name; there are {', '.join(known) or 'none'}",
        where="--cluster",
        mend="name one of these, or a file of your own: docs/slurm.md has all keys",
    )


def _by_key(values: Mapping[tuple[str, ...], Given]) -> dict[str, Given]:
    """Values by key; those of `environment` together again. Numbers where text is wanted are the text of them."""
    fields = Cluster.model_fields
    found: dict[str, Given] = {}
    for (key, *below), given in values.items():
        value = given.value
        if key == "environment" and below:
            before = found[key].value if key in found and isinstance(found[key].value, dict) else {}
            value = {**before, below[0]: _as_text(value) if len(below) == 1 else {}}
        elif below:  # a mapping where none belongs
            value = {}
        elif key in fields and "str" in str(fields[key].annotation) and not isinstance(value, bool):
            value = _as_text(value)
        if value is not None:
            found[key] = Given(value, given.source)
    return found


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _build(values: dict[str, Given], problems: list[Problem]) -> Cluster | None:
    fields = Cluster.model_fields
    for number, key in enumerate([key for key in values if key not in fields]):
        near = difflib.get_close_matches(key, fields, n=1) if number < 50 else []
        meant = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(fields)}"
        problems.append(Problem(f"{key if key.isprintable() else repr(key)}: unknown key; {meant}", values[key].source))
        del values[key]
    try:
        return Cluster.model_validate({key: given.value for key, given in values.items()}, strict=True)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            key = str(detail["loc"][0])
            inside = [place for place in detail["loc"][1:] if place != "[key]"]
            value = values[key].value
            for place in inside if detail["loc"][-1] != "[key]" else ():
                value = value[place]
            name = ".".join(map(str, (key, *inside)))
            why = detail["msg"].removeprefix("Value error, ")
            meaning = " ".join((fields[key].description or "").split())
            text = f"{name}: {shown(value)} found: {why}. Expected: {meaning}"
            problems.append(Problem(text, values[key].source))
    return None
