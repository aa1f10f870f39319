"""What a path holds, in a glance: kind, counts, dims, first keys. Large files are looked into, not read whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ddnn.errors import DataError, UserError
from ddnn.info.runs import GLANCE_BYTES, metrics_facts, model_facts, pretraining_facts, recipe_facts, run_facts
from ddnn.kaldi.alignments import read_alignments, read_pdf_counts
from ddnn.kaldi.archives import MEND, UNREADABLE, explain, iterate_int_vectors, iterate_matrices, open_source
from ddnn.kaldi.datadir import read_data_dir
from ddnn.kaldi.fst import read_fst, read_symbols
from ddnn.kaldi.nnet1 import read_nnet1
from ddnn.kaldi.nnet1_components import Activation, Component
from ddnn.kaldi.scp import ScpEntry, read_scp
from ddnn.kaldi.tables import MatrixReader
from ddnn.kaldi.transitions import read_transition_model

FEW = 3
"""Keys to show."""
SAMPLE = 1000
"""Entries of a table to look into."""
_FST = b"\xd6\xfd\xb2\x7e"
_HEAD_BYTES = 4096
_FILES = (
    "an scp (.scp), an archive of matrices or integers, an nnet1 network, a final.mdl, an FST, pdf counts, "
    "a recipe (.yaml), metrics (.jsonl), a model (.safetensors)"
)
_DIRECTORIES = (
    "a run dir (final.safetensors, metrics.jsonl, recipe.yaml), a data dir (feats.scp), "
    "an alignment dir (ali.*.gz, final.mdl), a graph dir (HCLG.fst)"
)


@dataclass(frozen=True)
class Info:
    """What `path` is: its `kind` in words and `facts` by name, in the order to show them."""

    path: Path
    kind: str
    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"path": str(self.path), "kind": self.kind, **self.facts}

    def as_text(self) -> str:
        """A line for the kind and one for each fact."""
        width = max((len(name) for name in self.facts), default=0)
        shown = {name: ", ".join(value) if isinstance(value, list) else value for name, value in self.facts.items()}
        lines = (f"  {name.replace('_', ' '):<{width}}  {value}" for name, value in shown.items())
        return "\n".join([f"{self.path}: {self.kind}", *lines])


def describe_path(path: Path) -> Info:
    """Says what a file or directory is: whatever ddnn reads or writes.

    Raises:
        UserError: nothing there, or none of the kinds that are known. DataError: known, but damaged.
    """
    if path.is_dir():
        return _directory(path)
    with open_source(path).stream as stream:
        try:
            head = stream.read(_HEAD_BYTES)
        except UNREADABLE as error:
            raise DataError(explain(error), where=path, mend=MEND) from error
    if path.suffix == ".safetensors":
        return Info(path, "ddnn model", model_facts(path))
    if path.suffix == ".scp":
        return Info(path, "scp", _scp(read_scp(path, allow_pipes=True)))
    if path.suffix == ".jsonl":
        return Info(path, "metrics of a training", metrics_facts(path))
    if path.suffix in (".yaml", ".yml"):
        return Info(path, "recipe", recipe_facts(path))
    return _by_first_bytes(path, head)


def _by_first_bytes(path: Path, head: bytes) -> Info:
    start = head.removeprefix(b"\0B").lstrip()
    if head.startswith(_FST):
        return Info(path, "OpenFst graph", _fst(path))
    if start.startswith(b"<TransitionModel>"):
        return Info(path, "Kaldi acoustic model (its transition model)", _transitions(path))
    if start.startswith(b"<Nnet>"):
        return Info(path, "Kaldi nnet1 network", _nnet1(read_nnet1(path)))
    if start.startswith(b"["):
        counts = read_pdf_counts(path)
        return Info(path, "Kaldi vector of pdf counts", {"pdfs": len(counts), "frames": float(counts.sum())})
    record = re.match(rb"[^\s\0]+[ \t]+(\0B(?:[FD]M |CM[23]? |\x04)|\[|-?\d+(?=[ \n]|$))|[^\s\0]+[ \t]*\n", head)
    if record is not None and record[1] is not None:
        form = "binary" if record[1].startswith(b"\0B") else "text"
        if record[1].endswith(b"\x04") or record[1][-1:].isdigit():
            return Info(path, f"archive of integer vectors ({form})", _archive(iterate_int_vectors(path)))
        kind = record[1][2:].decode().strip() or form if form == "binary" else form
        return Info(path, f"archive of matrices ({kind})", _archive(iterate_matrices(path)))
    raise _unknown(path, _FILES)


def _directory(path: Path) -> Info:
    def has(*names: str) -> bool:
        return any((path / name).exists() for name in names)

    if has("stack.safetensors", "rbm1.safetensors"):
        return Info(path, "ddnn pretraining dir", pretraining_facts(path))
    if has("final.safetensors", "metrics.jsonl", "recipe.yaml"):
        return Info(path, "ddnn run dir", run_facts(path))
    if has("loglikes.scp"):
        return Info(path, "log-likelihoods for a Kaldi decoder", _scp(read_scp(path / "loglikes.scp")))
    if has("feats.scp"):
        return Info(path, "Kaldi data dir", _data_dir(path))
    if has("HCLG.fst"):
        return Info(path, "Kaldi graph dir", _graph(path))
    if has("final.mdl") or next(path.glob("ali.*.gz"), None) is not None:
        return Info(path, "Kaldi alignment dir", _alignments(path))
    raise _unknown(path, _DIRECTORIES)


def _unknown(path: Path, looked_for: str) -> UserError:
    return UserError("nothing that ddnn knows", where=path, mend=f"known are: {looked_for}")


def _first(keys: Iterable[str]) -> list[str]:
    return list(islice(keys, FEW))


def _scp(entries: list[ScpEntry]) -> dict[str, Any]:
    """Counts, and frames and dims from the headers of some entries. A shell command is named, never run."""
    pipes = [entry for entry in entries if entry.pipe is not None]
    files = [entry for entry in entries if entry.pipe is None]
    facts: dict[str, Any] = {"entries": len(entries)}
    if pipes:
        facts["shell_commands"] = f"{len(pipes)}, not run"
    step = -(-len(files) // SAMPLE) or 1
    with MatrixReader() as reader:
        shapes = [reader.shape(entry) for entry in files[::step]]
    if shapes:
        frames = sum(rows for rows, _ in shapes) * len(files) // len(shapes)
        facts["frames"] = frames if step == 1 else f"about {frames}, from {len(shapes)} entries"
        facts["dims"] = _dims({columns for _, columns in shapes})
    return {**facts, "first_keys": _first(entry.key for entry in entries)}


def _dims(columns: set[int]) -> Any:
    return next(iter(columns)) if len(columns) == 1 else f"different: {', '.join(map(str, sorted(columns)))}"


def _archive(records: Iterator[tuple[str, NDArray[Any]]]) -> dict[str, Any]:
    """Counts of an archive, or of its beginning where it is long."""
    keys: list[str] = []
    columns: set[int] = set()
    frames = size = 0
    largest = -1
    whole = True
    for key, value in records:
        if size > GLANCE_BYTES:
            whole = False
            break
        keys.append(key)
        frames, size = frames + len(value), size + value.nbytes
        if value.ndim == 2:
            columns.add(value.shape[1])
        elif len(value):
            largest = max(largest, int(value.max()))
    more = "" if whole else "at least "
    facts: dict[str, Any] = {"records": len(keys) if whole else f"{more}{len(keys)}"}
    facts["frames"] = frames if whole else f"{more}{frames}"
    if columns:
        facts["dims"] = _dims(columns)
    else:
        facts["largest_id"] = largest if whole else f"{more}{largest}"
    return {**facts, "first_keys": _first(keys)}


def _data_dir(path: Path) -> dict[str, Any]:
    data = read_data_dir(path, allow_pipes=True)
    table = _scp(list(data.entries))
    facts: dict[str, Any] = {"utterances": table.pop("entries")}
    facts["speakers"] = "no utt2spk" if data.speakers is None else len(set(data.speakers.values()))
    facts["cmvn"] = "no cmvn.scp" if data.cmvn is None else f"statistics of {len(data.cmvn)}"
    return {**facts, **table}


def _alignments(path: Path) -> dict[str, Any]:
    jobs = sorted(path.glob("ali.*.gz"))
    facts: dict[str, Any] = {"final.mdl": "missing"}
    if (path / "final.mdl").exists():
        facts = _transitions(path / "final.mdl")
    facts["jobs"] = len(jobs)
    if "final.mdl" in facts or not jobs:
        return facts
    if sum(job.stat().st_size for job in jobs) <= GLANCE_BYTES // 8:
        alignments = read_alignments(path)
        facts["utterances"] = len(alignments.pdfs)
        facts["frames"] = sum(map(len, alignments.pdfs.values()))
        return {**facts, "first_keys": _first(alignments.pdfs)}
    return {**facts, "first_keys": [key for key, _ in islice(iterate_int_vectors(jobs[0]), FEW)]}


def _transitions(path: Path) -> dict[str, Any]:
    model = read_transition_model(path)
    return {"pdfs": model.num_pdfs, "phones": model.num_phones, "transition_ids": model.num_transition_ids}


def _graph(path: Path) -> dict[str, Any]:
    facts = _fst(path / "HCLG.fst")
    if (path / "words.txt").exists():
        facts["words"] = len(read_symbols(path / "words.txt"))
    return facts


def _fst(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > GLANCE_BYTES:
        return {"bytes": f"{size}, too many for a glance"}
    fst = read_fst(path)
    return {
        "states": fst.num_states,
        "arcs": fst.num_arcs,
        "largest_input_label": int(fst.arcs["ilabel"].max(initial=0)),
    }


def _nnet1(components: tuple[Component, ...]) -> dict[str, Any]:
    names = [c.kind if isinstance(c, Activation) else type(c).__name__.lower() for c in components]
    shape = [f"{name} {c.input_dim}-{c.output_dim}" for name, c in zip(names, components, strict=True)]
    return {"input_dim": components[0].input_dim, "output_dim": components[-1].output_dim, "components": shape}
