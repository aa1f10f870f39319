"""What a path is: kind, counts, dims, first keys. Of large files only the beginning is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ddnn.inspection.status import read_status
from ddnn.kaldi.alignments import read_alignments, read_pdf_counts
from ddnn.kaldi.archive import MatrixReader, ScpEntry, iterate_int_vectors, iterate_matrices, read_scp
from ddnn.kaldi.basic_types import open_stream, reading
from ddnn.kaldi.data_dir import read_data_dir
from ddnn.kaldi.fst import read_fst, read_symbols
from ddnn.kaldi.nnet1 import Activation, read_nnet1
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.training.metrics import format_figures, read_metrics
from ddnn.training.run_status import DBN, FINAL, METRICS, RECIPE, STATUS
from ddnn.util.errors import UserError
from ddnn.util.text import definitions, printable

NUM_KEYS = 3  # to show
NUM_SAMPLES = 1000  # entries of a table to look into
MAX_SCAN_BYTES = 64 << 20
_HEAD_BYTES = 4096
_FILES = (
    "an scp (.scp), an archive of matrices or integers, an nnet1 network, a final.mdl, an FST, pdf counts, "
    "a recipe (.yaml), metrics (.jsonl), a model (.safetensors)"
)


@dataclass(frozen=True)
class Info:
    """What `path` is: its `kind` in words and `fields` by name, in the order to show them."""

    path: Path
    kind: str
    fields: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), "kind": self.kind, **self.fields}

    def as_text(self) -> str:
        texts = {k: ", ".join(value) if isinstance(value, list) else str(value) for k, value in self.fields.items()}
        lines = definitions(((name.replace("_", " "), text) for name, text in texts.items()), indent="  ")
        return f"{printable(str(self.path), '')}: {self.kind}\n{lines}"


def describe_path(path: Path) -> Info:
    """Says what a file or directory is: whatever ddnn reads or writes. UserError: nothing there, or none of the kinds
    that are known. DataError: known, but damaged."""
    if path.is_dir():
        for names, kind, fields in _DIRECTORIES:
            if any(next(path.glob(name), None) is not None for name in names):
                return Info(path, kind, fields(path))
        known = "; ".join(f"{kind} ({', '.join(names)})" for names, kind, _ in _DIRECTORIES)
        raise UserError("not a directory that ddnn reads or writes", location=path, hint=f"known are: {known}")
    with open_stream(path).stream as stream, reading(path):
        head = stream.read(_HEAD_BYTES)
    if path.suffix in _SUFFIXES:
        kind, fields = _SUFFIXES[path.suffix]
        return Info(path, kind, fields(path))
    start = head.removeprefix(b"\0B").lstrip()
    for beginning, kind, fields in _BEGINNINGS:
        if start.startswith(beginning):
            return Info(path, kind, fields(path))
    record = re.match(rb"[^\s\0]+[ \t]+(\0B(?:[FD]M |CM[23]? |\x04)|\[|-?\d+(?=[ \n]|$))|[^\s\0]+[ \t]*\n", head)
    if record is None or record[1] is None:
        raise UserError("not a file that ddnn reads or writes", location=path, hint=f"known are: {_FILES}")
    form = "binary" if record[1].startswith(b"\0B") else "text"
    if record[1].endswith(b"\x04") or record[1][-1:].isdigit():
        return Info(path, f"archive of integer vectors ({form})", _archive(iterate_int_vectors(path)))
    kind = record[1][2:].decode().strip() or form if form == "binary" else form
    return Info(path, f"archive of matrices ({kind})", _archive(iterate_matrices(path)))


def _model(path: Path) -> dict[str, Any]:
    from ddnn.nn.acoustic_model import load_model  # torch takes a second; the other kinds do without

    model = load_model(path)
    layers = model.network.layers
    return {
        "network": "-".join(str(dim) for dim in [layers[0].input_dim, *(layer.output_dim for layer in layers)]),
        "activations": list(dict.fromkeys(layer.label for layer in layers)),
        "parameters": model.network.parameters.numel(),
        "pdfs": layers[-1].output_dim,
        "cmvn": model.features.cmvn,
        "deltas": model.features.deltas,
    }


def _run_dir(path: Path) -> dict[str, Any]:
    """How the run is doing, as `ddnn status` says it without asking Slurm, and its model if there is one."""
    status = read_status(path, lambda job: None)
    fields: dict[str, Any] = {"state": status.state, **{k: v for k, v in status.lines().items() if v}}
    if status.problems:
        fields["problems"] = list(status.problems)
    for name in (FINAL, DBN):
        if (path / name).exists():
            fields |= _model(path / name)
    return fields


def _metrics(path: Path) -> dict[str, Any]:
    metrics = read_metrics(path)
    rbms = {row.rbm: row for row in metrics.pretraining}
    fields: dict[str, Any] = {f"rbm_{number}": row.as_text() for number, row in sorted(rbms.items())}
    if metrics.cv or not rbms:
        fields["epochs"] = metrics.cv[-1].epoch if metrics.cv else 0
    if metrics.cv:
        fields["last"] = format_figures(metrics.cv[-1])
    for name in ("last_accepted", "lowest_loss"):
        if getattr(metrics, name) is not None:
            fields[name] = format_figures(getattr(metrics, name))
    if metrics.starts:
        fields["precision"] = metrics.starts[-1].precision
    if metrics.workers:
        fields["workers"] = metrics.num_workers
    return fields


def _recipe(path: Path) -> dict[str, Any]:
    from ddnn.recipe.load import load_recipe

    recipe = load_recipe(path, must_exist=False)
    return {
        "train": printable(str(recipe.data.train), ""),
        "alignments": printable(str(recipe.data.alignments), ""),
        "model": recipe.model.summary(),
        "training": f"{recipe.optimizer.name}, {recipe.schedule.name} from {recipe.schedule.initial_learning_rate:g}",
        "minibatch": recipe.minibatch_size,
        "precision": recipe.precision,
    }


def _first(keys: Iterable[str]) -> list[str]:
    return list(islice(keys, NUM_KEYS))


def _scp(entries: list[ScpEntry]) -> dict[str, Any]:
    """Counts, and frames and dims from the headers of some entries. A shell command is named, never run."""
    pipes = [entry for entry in entries if entry.pipe is not None]
    files = [entry for entry in entries if entry.pipe is None]
    fields: dict[str, Any] = {"entries": len(entries)}
    if pipes:
        fields["shell_commands"] = f"{len(pipes)}, not run"
    step = -(-len(files) // NUM_SAMPLES) or 1
    with MatrixReader() as reader:
        shapes = [reader.shape(entry) for entry in files[::step]]
    if shapes:
        frames = sum(rows for rows, _ in shapes) * len(files) // len(shapes)
        fields["frames"] = frames if step == 1 else f"about {frames}, from {len(shapes)} entries"
        fields["dims"] = _dims({columns for _, columns in shapes})
    return {**fields, "first_keys": _first(entry.key for entry in entries)}


def _dims(columns: set[int]) -> Any:
    return next(iter(columns)) if len(columns) == 1 else f"different: {', '.join(map(str, sorted(columns)))}"


def _archive(records: Iterator[tuple[str, NDArray[Any]]]) -> dict[str, Any]:
    """Counts of an archive, or of its beginning where it is long."""
    keys: list[str] = []
    columns: set[int] = set()
    frames, size, largest, more = 0, 0, -1, ""
    for key, value in records:
        if size > MAX_SCAN_BYTES:
            more = "at least "
            break
        keys.append(key)
        frames, size = frames + len(value), size + value.nbytes
        if value.ndim == 2:
            columns.add(value.shape[1])
        elif len(value):
            largest = max(largest, int(value.max()))
    counts = {"records": len(keys), "frames": frames, **({} if columns else {"largest_id": largest})}
    fields: dict[str, Any] = {name: f"{more}{count}" if more else count for name, count in counts.items()}
    if columns:
        fields["dims"] = _dims(columns)
    return {**fields, "first_keys": _first(keys)}


def _data_dir(path: Path) -> dict[str, Any]:
    data = read_data_dir(path, allow_pipes=True)
    table = _scp(list(data.entries))
    return {
        "utterances": table.pop("entries"),
        "speakers": "no utt2spk" if data.speakers is None else len(set(data.speakers.values())),
        "cmvn": "no cmvn.scp" if data.cmvn is None else f"statistics of {len(data.cmvn)}",
        **table,
    }


def _alignments(path: Path) -> dict[str, Any]:
    jobs = sorted(path.glob("ali.*.gz"))
    if not (path / "final.mdl").exists():
        return {"final.mdl": "missing", "jobs": len(jobs)}
    fields = {**_transitions(path / "final.mdl"), "jobs": len(jobs)}
    if not jobs:
        return fields
    if sum(job.stat().st_size for job in jobs) > MAX_SCAN_BYTES // 8:
        return {**fields, "first_keys": _first(key for key, _ in iterate_int_vectors(jobs[0]))}
    pdfs = read_alignments(path).pdfs
    return {**fields, "utterances": len(pdfs), "frames": sum(map(len, pdfs.values())), "first_keys": _first(pdfs)}


def _transitions(path: Path) -> dict[str, Any]:
    model = read_transition_model(path)
    return {"pdfs": model.num_pdfs, "phones": model.num_phones, "transition_ids": model.num_transition_ids}


def _graph(path: Path) -> dict[str, Any]:
    fields = _fst(path / "HCLG.fst")
    if (path / "words.txt").exists():
        fields["words"] = len(read_symbols(path / "words.txt"))
    return fields


def _fst(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > MAX_SCAN_BYTES:
        return {"bytes": f"{size}, too many to scan"}
    fst = read_fst(path)
    largest = int(fst.arcs["ilabel"].max(initial=0))
    return {"states": fst.num_states, "arcs": fst.num_arcs, "largest_input_label": largest}


def _nnet1(path: Path) -> dict[str, Any]:
    components = read_nnet1(path)
    names = [c.kind if isinstance(c, Activation) else type(c).__name__.lower() for c in components]
    shape = [f"{name} {c.input_dim}-{c.output_dim}" for name, c in zip(names, components, strict=True)]
    return {"input_dim": components[0].input_dim, "output_dim": components[-1].output_dim, "components": shape}


def _pdf_counts(path: Path) -> dict[str, Any]:
    counts = read_pdf_counts(path)
    return {"pdfs": len(counts), "frames": float(counts.sum())}


Fields = Callable[[Path], dict[str, Any]]
_SUFFIXES: dict[str, tuple[str, Fields]] = {
    ".safetensors": ("ddnn model", _model),
    ".scp": ("scp", lambda path: _scp(read_scp(path, allow_pipes=True))),
    ".jsonl": ("metrics of a training", _metrics),
    ".yaml": ("recipe", _recipe),
    ".yml": ("recipe", _recipe),
}
_BEGINNINGS: tuple[tuple[bytes, str, Fields], ...] = (
    (b"\xd6\xfd\xb2\x7e", "OpenFst graph", _fst),
    (b"<TransitionModel>", "Kaldi acoustic model (its transition model)", _transitions),
    (b"<Nnet>", "Kaldi nnet1 network", _nnet1),
    (b"[", "Kaldi vector of pdf counts", _pdf_counts),
)
_DIRECTORIES: tuple[tuple[tuple[str, ...], str, Fields], ...] = (
    ((DBN, "rbm1.safetensors"), "ddnn pretraining dir", _run_dir),
    ((STATUS, FINAL, METRICS, RECIPE), "ddnn run dir", _run_dir),
    (("loglikes.scp",), "log-likelihoods for a Kaldi decoder", lambda path: _scp(read_scp(path / "loglikes.scp"))),
    (("feats.scp",), "Kaldi data dir", _data_dir),
    (("HCLG.fst",), "Kaldi graph dir", _graph),
    (("final.mdl", "ali.*.gz"), "Kaldi alignment dir", _alignments),
)
