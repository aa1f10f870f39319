"""What a path is: its kind, recognized by its name and first bytes. For what ddnn reads or writes, also counts, dims and the
first keys. Only the beginning of a large file is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ddnn.decoding.options import read_choice
from ddnn.inspection.status import read_status
from ddnn.kaldi.alignments import read_alignments, read_pdf_counts
from ddnn.kaldi.archive import (
    MatrixReader,
    ScpEntry,
    iterate_int_vectors,
    iterate_matrices,
    read_keyed_lines,
    read_scp,
)
from ddnn.kaldi.basic_types import locating_errors, open_stream
from ddnn.kaldi.data_dir import read_data_dir, read_text, read_utt2spk
from ddnn.kaldi.fst import read_fst, read_symbols
from ddnn.kaldi.nnet1 import Activation, Component, ParallelComponent
from ddnn.kaldi.nnet1_file import TOKENS, read_nnet1
from ddnn.kaldi.transforms import find_final_mat, fmllr_files, read_matrix, read_transform_config
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.runs.metrics import read_metrics
from ddnn.runs.rows import format_figures
from ddnn.runs.run_status import CV_UTTERANCES, DBN, FINAL, METRICS, PDF_COUNTS, RECIPE, STATUS
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import read_bytes_limited
from ddnn.util.text import definitions, printable

NUM_KEYS = 3  # to show
NUM_SAMPLES = 1000  # entries of a table to look into
MAX_SCAN_BYTES = 64 << 20
_HEAD_BYTES = 4096

Fields = dict[str, Any]  # by name, in the order to show them; None or "" is not shown


@dataclass(frozen=True)
class Info:
    """What `path` is, in words, and its fields."""

    path: Path
    kind: str
    fields: Fields

    def as_dict(self) -> Fields:
        return {"path": str(self.path), "kind": self.kind, **self.fields}

    def as_text(self) -> str:
        texts = {k: ", ".join(value) if isinstance(value, list) else str(value) for k, value in self.fields.items()}
        lines = definitions([(name.replace("_", " "), text) for name, text in texts.items()], indent="  ")
        return f"{printable(str(self.path), '')}: {self.kind}\n{lines}".rstrip()


def describe_path(path: Path) -> Info:
    """Names what a file or directory is, and describes what ddnn reads or writes. UserError: of no known kind. DataError:
    nothing there, or damaged."""
    what, kinds, head = "directory", _DIRECTORIES, b""
    if not path.is_dir():
        what, kinds = "file type", _FILES
        with open_stream(path).stream as stream, locating_errors(path):
            head = stream.read(_HEAD_BYTES)
    for names, beginning, kind, describe in kinds:
        match = re.match(beginning, head, re.DOTALL)
        if match is not None and any(_is_called(path, name) for name in names.split()):
            fields = {name: value for name, value in describe(path).items() if value not in (None, "")}
            return Info(path, kind.format(*map(bytes.decode, match.groups())), fields)
    recognized = {
        f"{kind} ({names})" if path.is_dir() else kind.partition(" (")[0]: None for names, _, kind, _ in kinds
    }
    raise UserError(f"unrecognized {what}", location=path, hint=f"recognized are: {', '.join(recognized)}")


def _is_called(path: Path, name: str) -> bool:
    """A file by its name, a directory by a file in it."""
    return any(path.glob(name)) if path.is_dir() else fnmatch(path.name, name)


def _nothing(path: Path) -> Fields:
    """Of a file or directory that ddnn does not read."""
    return {}


def _matrix(path: Path) -> Fields:
    rows, columns = read_matrix(path).shape
    return {"rows": rows, "columns": columns}


def _pdf_counts(path: Path) -> Fields:
    counts = read_pdf_counts(path)
    total, added = float(counts.sum()), {}
    if (counts % 1 == 0.5).all():  # as ddnn writes them, after Kaldi's scripts
        total, added = total - 0.5 * len(counts), {"added": "half a frame for each pdf"}
    return {"pdfs": len(counts), "frames": int(total) if total.is_integer() else total, **added}


def _model(path: Path) -> Fields:
    from ddnn.nn.acoustic_model import load_model  # torch takes a second; the other kinds do without
    from ddnn.nn.layers import describe_layers, describe_sizes

    model = load_model(path)
    layers, transform, features = model.network.layers, model.transform, model.features
    before, after = -min(transform.offsets), max(transform.offsets)
    contiguous = transform.offsets == tuple(range(-before, after + 1))
    return {
        "network": describe_sizes(layers),
        "layers": describe_layers(layers),
        "parameters": model.network.parameters.numel(),
        # The outputs of an RBM or DBN are not pdfs; an imported network may lack its softmax.
        "pdfs": layers[-1].output_dim if layers[-1].must_be_last or path.name == FINAL else None,
        "splice": f"{before}+1+{after}" if contiguous else f"frames {', '.join(map(str, transform.offsets))}",
        "normalized": "no" if transform.shift is None and transform.scale is None else "yes",
        "cmvn": features.cmvn,
        "deltas": features.deltas,
        "transforms": features.transforms and features.transforms.as_text(),
    }


def _run_dir(path: Path) -> Fields:
    """How the run is doing, as `ddnn status` says it without asking Slurm, and its model if there is one."""
    status = read_status(path, lambda job: None)
    fields: Fields = {"state": status.state, "status": status.as_text()}
    with suppress(UserError):  # a run of before 0.2.0 may have a recipe that is no longer read
        fields |= _initialization(path / RECIPE)
    with suppress(OSError):  # a training of before 0.2.0 has no such list
        fields["cv_utterances"] = read_bytes_limited(path / CV_UTTERANCES, MAX_SCAN_BYTES).count(b"\n")
    for name in (FINAL, DBN):
        if (path / name).exists():
            fields |= _model(path / name)
    if (path / FINAL).exists():
        fields["pdf_counts"] = "yes" if (path / PDF_COUNTS).exists() else "no: ddnn decode-prep needs them"
    return fields


def _run_dirs(path: Path) -> Fields:
    runs = [run.parent for run in sorted(path.glob(f"*/{RECIPE}"))]
    states = [f"{run.name} ({read_status(run, lambda job: None).state})" for run in runs[:50]]
    return {"number": len(runs), "runs": states}


def _metrics(path: Path) -> Fields:
    metrics = read_metrics(path)
    return {
        **{f"rbm_{row.rbm}": row.as_text() for row in metrics.pretraining},
        "last": format_figures(metrics.cv[-1]) if metrics.cv else None,
        "last_accepted": format_figures(metrics.last_accepted, metrics.combination),
        "lowest_loss": format_figures(metrics.lowest_loss),
        "ended": metrics.end and metrics.end.reason_text,
        "precision": metrics.starts[-1].precision if metrics.starts else None,
        "workers": metrics.num_workers or None,
    }


def _initialization(path: Path) -> Fields:
    """The network or RBMs that the training of a recipe starts from, and its frozen layers, if any."""
    from ddnn.recipe.load import load_recipe

    recipe = load_recipe(path, must_exist=False)
    start = recipe.pretrain.dbn if isinstance(recipe.init, str) else recipe.init.model
    return {
        "started_from": start and printable(str(start), ""),
        "frozen_layers": list(map(str, recipe.model.freeze or ())) or None,
    }


def _recipe(path: Path) -> Fields:
    from ddnn.recipe.load import load_recipe
    from ddnn.recipe.section import as_list

    recipe = load_recipe(path, must_exist=False)
    return {
        "train": printable(", ".join(map(str, as_list(recipe.data.train))), ""),
        "alignments": printable(", ".join(map(str, as_list(recipe.data.alignments))), ""),
        "model": recipe.model.summary(),
        "training": f"{recipe.optimizer.name}, {recipe.schedule.name} from {recipe.schedule.initial_learning_rate:g}",
        "minibatch": recipe.minibatch,
        "precision": recipe.precision,
        **_initialization(path),
    }


def _first(keys: Iterable[str]) -> list[str]:
    return list(islice(keys, NUM_KEYS))


def _scp(entries: Sequence[ScpEntry]) -> Fields:
    """Counts, and frames and dims from the headers of some entries. A shell command is named, never run."""
    files = [entry for entry in entries if entry.pipe is None]
    commands, step = len(entries) - len(files), -(-len(files) // NUM_SAMPLES) or 1
    with MatrixReader() as reader:
        shapes = [reader.shape(entry) for entry in files[::step]]
    frames: Any = sum(rows for rows, _ in shapes) * len(files) // (len(shapes) or 1)
    if step > 1:
        frames = f"about {frames}, from {len(shapes)} entries"
    return {
        "entries": len(entries),
        "shell_commands": f"{commands}, not run" if commands else None,
        "frames": frames if shapes else None,
        "dims": _dims({columns for _, columns in shapes}),
        "first_keys": _first(entry.key for entry in entries),
    }


def _scp_file(path: Path) -> Fields:
    return _scp(read_scp(path, allow_pipes=True))


def _decoded(path: Path) -> Fields:
    """A dir of `ddnn decode-prep`."""
    return _scp_file(next(path.glob("[lpa]*s.scp")))


def _dims(columns: set[int]) -> Any:
    if len(columns) > 1:
        return f"different: {', '.join(map(str, sorted(columns)))}"
    return next(iter(columns), None)


def _archive(iterate: Callable[[Path], Iterator[tuple[str, NDArray[Any]]]], path: Path) -> Fields:
    records = iterate(path)
    shapes: dict[str, tuple[int, ...]] = {}
    largest = -1
    for key, value in islice(records, NUM_SAMPLES):
        shapes[key] = value.shape
        if value.ndim == 1:
            largest = int(value.max(initial=largest))
    more, is_trans = any(True for _ in records), path.name.startswith("trans.")  # of speakers, not of frames
    sums = {"records": len(shapes), "rows" if is_trans else "frames": sum(shape[0] for shape in shapes.values())}
    columns = {shape[-1] for shape in shapes.values() if len(shape) > 1}
    return {
        **{name: f"at least {number}" if more else number for name, number in sums.items()},
        "dims": _dims(columns),
        "largest_id": None if columns else largest,
        "first_keys": _first(shapes),
    }


def _scoring(path: Path) -> Fields:
    choice, wer = read_choice(path), json.loads((path / "score.json").read_bytes()).get("wer")
    figures = {"acoustic_scale": choice.acoustic_scale, "word_insertion_penalty": choice.word_insertion_penalty}
    words = _transcripts(path / "text") if (path / "text").exists() else {}
    return {"wer": wer if isinstance(wer, float) else "unknown", **figures, **words}


def _data_dir(path: Path) -> Fields:
    data = read_data_dir(path, allow_pipes=True)
    table = _scp(data.entries)
    return {
        "utterances": table.pop("entries"),
        "speakers": "no utt2spk" if data.speakers is None else len(set(data.speakers.values())),
        "cmvn": "no cmvn.scp" if data.cmvn is None else f"statistics of {len(data.cmvn)}",
        **table,
    }


def _alignment_dir(path: Path) -> Fields:
    jobs = sorted(path.glob("ali.*.gz"))
    if not (path / "final.mdl").exists():
        return {"final.mdl": "missing", "jobs": len(jobs)}
    few = sum(job.stat().st_size for job in jobs) <= MAX_SCAN_BYTES // 8
    pdfs = read_alignments(path).pdfs if jobs and few else {}
    keys = pdfs if few else (key for key, _ in iterate_int_vectors(jobs[0]))
    return {
        **_transitions(path / "final.mdl"),
        "jobs": len(jobs),
        "utterances": len(pdfs) or None,
        "frames": sum(map(len, pdfs.values())) or None,
        "first_keys": _first(keys) or None,
        **_transforms(path),
    }


def _transforms(path: Path) -> Fields:
    """The final.mat and trans.* that the features of a Kaldi dir go through, if any."""
    try:
        final_mat, files = find_final_mat(path), fmllr_files(path)
        if final_mat is None and not files:
            return {}
        text = read_transform_config(path).as_text()
        if final_mat is not None:
            rows, columns = read_matrix(final_mat).shape
            text = text.replace("LDA+MLLT", f"LDA+MLLT {rows} x {columns}")
        if files:
            number = sum(1 for _ in islice(chain.from_iterable(map(iterate_matrices, files)), NUM_SAMPLES))
            text += f" of {'at least ' if number == NUM_SAMPLES else ''}{number} speakers or utterances"
        return {"transforms": text}
    except UserError as error:
        return {"transforms": f"not readable: {error.message} ({error.location})"}


def _transitions(path: Path) -> Fields:
    model = read_transition_model(path)
    return {"pdfs": model.num_pdfs, "phones": model.num_phones, "transition_ids": model.num_transition_ids}


def _graph(path: Path) -> Fields:
    words = path / "words.txt"
    return {**_fst(path / "HCLG.fst"), "words": len(read_symbols(words)) if words.exists() else None}


def _fst(path: Path) -> Fields:
    size = path.stat().st_size
    if size > MAX_SCAN_BYTES:
        return {"bytes": f"{size}, too many to scan"}
    fst = read_fst(path)
    largest = int(fst.arcs["ilabel"].max(initial=0))
    return {"states": fst.num_states, "arcs": fst.num_arcs, "largest_input_label": largest}


def _nnet1(path: Path) -> Fields:
    components = read_nnet1(path)
    shape = [_component(component) for component in components]
    return {"input_dim": components[0].input_dim, "output_dim": components[-1].output_dim, "components": shape}


def _component(component: Component) -> str:
    name = type(component).__name__.removesuffix("Component").lower()
    name = component.kind if isinstance(component, Activation) else name
    networks = component.networks if isinstance(component, ParallelComponent) else ()
    nested = " | ".join(", ".join(map(_component, network)) for network in networks)
    return f"{name} {component.input_dim}-{component.output_dim}" + (f" ({nested})" if nested else "")


def _nnet1_dir(path: Path) -> Fields:
    """The networks of a dir of `ddnn export` or of Kaldi's: name -> input, layer and output dimensions."""
    names = sorted(file.name for pattern in _NNET1_FILES.split() for file in path.glob(pattern))[:20]
    features = None
    with suppress(DataError):
        from ddnn.nn.acoustic_model import nnet1_features  # imports torch

        features = nnet1_features(path)
    return {
        "networks": [f"{name} {_shape(read_nnet1(path / name))}" for name in names],
        "features": features and str(features),
        "pdf_counts": _pdf_counts(path / PDF_COUNTS)["pdfs"] if (path / PDF_COUNTS).exists() else None,
    }


def _shape(components: Sequence[Component]) -> str:
    dims = (component.output_dim for component in components if not isinstance(component, Activation))
    return "-".join(map(str, [components[0].input_dim, *dims]))


def _table(path: Path) -> Fields:
    keys = [key for _, key, _ in read_keyed_lines(path, path.name)]
    return {"entries": len(keys), "first_keys": _first(keys)}


def _utt2spk(path: Path) -> Fields:
    speakers = read_utt2spk(path)
    return {"utterances": len(speakers), "speakers": len(set(speakers.values())), "first_keys": _first(speakers)}


def _transcripts(path: Path) -> Fields:
    words = read_text(path)
    spoken = list(chain.from_iterable(words.values()))
    counts = {"utterances": len(words), "words": len(spoken), "different_words": len(set(spoken))}
    return {**counts, "first_keys": _first(words)}


def _symbols(path: Path) -> Fields:
    symbols = read_symbols(path)
    return {"symbols": len(symbols), "largest_id": max(symbols, default=0)}


def _lines(path: Path) -> Fields:
    lines = read_bytes_limited(path, MAX_SCAN_BYTES).decode(errors="replace").rstrip("\n").split("\n")
    return {"lines": len(lines), "last": lines[-1][:200]}


_NNET1_FILES = "*.nnet *.dbn final.feature_transform"
_KEY = rb"[^\s\0]+[ \t]+"
_NUMBER = rb"\x04.{4}"
_POSTERIORS = "archive of Kaldi posteriors, not read by ddnn"
_TABLES = "segments wav.scp reco2file_and_channel spk2gender utt2dur utt2num_frames stm glm"
Kind = tuple[str, bytes, str, Callable[[Path], Fields]]  # names, first bytes, what it is, its description
_FILES: tuple[Kind, ...] = (
    ("utt2spk", b"", "utt2spk of a Kaldi data dir", _utt2spk),
    ("spk2utt", b"", "spk2utt of a Kaldi data dir", _nothing),
    ("text", b"", "transcripts of a Kaldi data dir", _transcripts),
    ("words.txt phones.txt", b"", "symbol table", _symbols),
    (_TABLES, b"", "table of a Kaldi data dir", _nothing),
    ("cv_utterances cv_speakers.txt", b"", "list for cross-validation", _table),
    ("cmvn_opts splice_opts delta_opts num_jobs", b"", "setting of a Kaldi experiment", _lines),
    ("train.log job.out", b"", "log of a training", _lines),
    ("*.safetensors", b"", "ddnn model", _model),
    ("*.scp", b"", "scp", _scp_file),
    ("*.jsonl", b"", "metrics of a training", _metrics),
    ("*.yaml *.yml", b"", "recipe", _recipe),
    ("*", rb"\0B[FD]M |\0BCM[23]? |\s*\[[ \t]*\n", "Kaldi matrix", _matrix),
    ("*.counts", rb"\0B[FD]V |\s*\[", "Kaldi vector of pdf counts", _pdf_counts),
    ("*", rb"\0B[FD]V |\s*\[", "Kaldi vector", _nothing),
    ("*", rb"(?:\0B)?\xd6\xfd\xb2\x7e", "OpenFst graph", _fst),
    ("*", rb"(?:\0B)?\s*<TransitionModel>", "Kaldi acoustic model (its transition model)", _transitions),
    ("*", rb"(?:\0B)?\s*ContextDependency", "Kaldi phonetic decision tree", _nothing),
    ("*", rb"(?:\0B)?\s*<Topology>", "Kaldi HMM topology", _nothing),
    ("*", rb"(?i:(?:\0B)?\s*(?:<nnet>|%b))" % "|".join(TOKENS).encode(), "Kaldi nnet1 network", _nnet1),
    (
        "*",
        _KEY + rb"\0B\xd6\xfd\xb2\x7e\x06\0{3}vector.\0{3}(\w*lattice\d*)",
        "archive of Kaldi lattices ({})",
        _nothing,
    ),
    # Frames, then pairs of pdf and weight of each; a weight is a small float, its last byte.
    ("*", _KEY + rb"\0B%b(?:\x04\0{4})*%b%b\x04.{3}[\x30-\x4f]" % (_NUMBER, _NUMBER, _NUMBER), _POSTERIORS, _nothing),
    ("*", _KEY + rb"\[[^\]\n]*\][ \t]*\[", _POSTERIORS, _nothing),
    ("*", _KEY + rb"\0B\x04", "archive of integer vectors (binary)", partial(_archive, iterate_int_vectors)),
    ("*", _KEY + rb"-?\d+(?=[ \n]|$)", "archive of integer vectors (text)", partial(_archive, iterate_int_vectors)),
    ("*", _KEY + rb"\0B([FD]M|CM[23]?) ", "archive of matrices ({})", partial(_archive, iterate_matrices)),
    ("*", _KEY + rb"\[", "archive of matrices (text)", partial(_archive, iterate_matrices)),
)
_DIRECTORIES: tuple[Kind, ...] = (
    # The names are those of files in it, of which one is enough.
    (f"{DBN} rbm1.safetensors", b"", "ddnn pretraining dir", _run_dir),
    (f"{STATUS} {FINAL} {METRICS} {RECIPE}", b"", "ddnn run dir", _run_dir),
    ("loglikes.scp", b"", "log-likelihoods for a Kaldi decoder", _decoded),
    ("posteriors.scp", b"", "posteriors or log-posteriors", _decoded),
    ("activations.scp", b"", "activations of a layer", _decoded),
    ("score.json", b"", "words and word error rates of ddnn score", _scoring),
    ("feats.scp", b"", "Kaldi data dir", _data_dir),
    ("HCLG.fst", b"", "Kaldi graph dir", _graph),
    ("lat.*.gz", b"", "Kaldi decoding dir (lattices)", _transforms),
    (_NNET1_FILES, b"", "Kaldi nnet1 dir", _nnet1_dir),
    ("final.mdl ali.*.gz", b"", "Kaldi alignment dir", _alignment_dir),
    ("trans.1", b"", "Kaldi dir of transforms", _transforms),
    ("L.fst topo", b"", "Kaldi lang dir", _nothing),
    (f"*/{RECIPE}", b"", "folder of ddnn run dirs", _run_dirs),
)
