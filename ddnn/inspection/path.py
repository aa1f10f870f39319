"""What a path is: kind, counts, dims, first keys. Of large files only the beginning is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
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
from ddnn.kaldi.basic_types import open_model, open_stream, reading
from ddnn.kaldi.data_dir import read_data_dir, read_text, read_utt2spk
from ddnn.kaldi.fst import read_fst, read_symbols
from ddnn.kaldi.nnet1 import Activation, Component, ParallelComponent
from ddnn.kaldi.nnet1_file import TOKENS, read_nnet1
from ddnn.kaldi.transforms import find_final_mat, fmllr_files, read_matrix, read_transform_config
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.runs.metrics import format_figures, read_metrics
from ddnn.runs.run_status import CV_UTTERANCES, DBN, FINAL, METRICS, PDF_COUNTS, RECIPE, STATUS
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import read_bytes_limited
from ddnn.util.text import definitions, plural, printable

NUM_KEYS = 3  # to show
NUM_SAMPLES = 1000  # entries of a table to look into
MAX_SCAN_BYTES = 64 << 20
_HEAD_BYTES = 4096
_FILES = (
    "scp, archives of matrices, integers and lattices, nnet1 networks, final.mdl, tree, topo, FSTs, pdf counts, utt2spk, "
    "text, segments and the other tables of a data dir, words.txt, phones.txt, recipes (.yaml), metrics (.jsonl), "
    "models (.safetensors), train.log"
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
        raise UserError("unrecognized directory", location=path, hint=f"recognized are: {known}")
    kind, fields = next(((k, f) for names, k, f in _NAMES if path.name in names), ("", _scp_file))
    if kind:
        return Info(path, kind, fields(path))
    with open_stream(path).stream as stream, reading(path):
        head = stream.read(_HEAD_BYTES)
    if path.suffix in _SUFFIXES:
        kind, fields = _SUFFIXES[path.suffix]
        return Info(path, kind, fields(path))
    if re.match(rb"\0B(?:[FD][MV] |CM[23]? )|\s*\[", head):
        return Info(path, *_without_key(path, is_matrix=re.match(rb"\0B.M|\s*\[[ \t]*\n", head) is not None))
    start = head.removeprefix(b"\0B").lstrip()
    for beginning, kind, fields in _BEGINNINGS:
        if start.lower().startswith(beginning.lower()):
            return Info(path, kind, fields(path))
    lattice = re.match(rb"([^\s\0]+) \0B\xd6\xfd\xb2\x7e\x06\0\0\0vector.\0\0\0(\w*lattice\d*)", head, re.DOTALL)
    if lattice is not None:
        return Info(path, f"archive of Kaldi lattices ({lattice[2].decode()})", {"first_keys": [_text(lattice[1])]})
    posteriors = _POSTERIORS.match(head)
    if posteriors is not None:
        form = "binary" if posteriors[2] else "text"
        return Info(
            path, f"archive of Kaldi posteriors ({form}), not read by ddnn", {"first_keys": [_text(posteriors[1])]}
        )
    record = re.match(rb"[^\s\0]+[ \t]+(\0B(?:[FD]M |CM[23]? |\x04)|\[|-?\d+(?=[ \n]|$))|[^\s\0]+[ \t]*\n", head)
    if record is None or record[1] is None:
        raise UserError("unrecognized file type", location=path, hint=f"recognized are: {_FILES}")
    form = "binary" if record[1].startswith(b"\0B") else "text"
    if record[1].endswith(b"\x04") or record[1][-1:].isdigit():
        return Info(path, f"archive of integer vectors ({form})", _archive(iterate_int_vectors(path)))
    kind = record[1][2:].decode().strip() or form if form == "binary" else form
    of_transforms = path.name.startswith("trans.")
    return Info(path, f"archive of matrices ({kind})", _archive(iterate_matrices(path), of_transforms=of_transforms))


def _without_key(path: Path, *, is_matrix: bool) -> tuple[str, dict[str, Any]]:
    """Kind and fields of a file that is one matrix or vector."""
    if is_matrix:
        rows, columns = read_matrix(path).shape
        return f"Kaldi matrix, {rows} x {columns}", {"rows": rows, "columns": columns}
    try:
        return "Kaldi vector of pdf counts", _pdf_counts(path)
    except DataError:
        with open_model(path, "a Kaldi vector") as reader:
            values = reader.float_vector()
        if not (np.isfinite(values).all() and (values < 0).any()):
            raise
        return f"Kaldi vector, {len(values)} values", {"values": len(values)}


def _model(path: Path) -> dict[str, Any]:
    from ddnn.nn.acoustic_model import load_model  # torch takes a second; the other kinds do without
    from ddnn.nn.layers import describe_layers, describe_sizes

    model = load_model(path)
    layers, transform = model.network.layers, model.transform
    before, behind = -min(transform.offsets), max(transform.offsets)
    whole = transform.offsets == tuple(range(-before, behind + 1))
    equal = all(layer.kind == "affine" for layer in layers)
    return {
        "network": describe_sizes(layers),
        **({} if equal else {"layers": describe_layers(layers[:-1])}),
        "activations": list(
            dict.fromkeys(layer.label for layer in layers if layer.kind in ("affine", "activation", "prelu"))
        ),
        "parameters": model.network.parameters.numel(),
        # The outputs of an RBM or DBN are no pdfs; an imported network may lack its softmax.
        **({"pdfs": layers[-1].output_dim} if layers[-1].must_be_last or path.name == FINAL else {}),
        "splice": f"{before}+1+{behind}" if whole else f"frames {', '.join(map(str, transform.offsets))}",
        "normalized": "no" if transform.shift is None and transform.scale is None else "yes",
        "cmvn": model.features.cmvn,
        "deltas": model.features.deltas,
        **({"transforms": transforms.as_text()} if (transforms := model.features.transforms) is not None else {}),
    }


def _run_dir(path: Path) -> dict[str, Any]:
    """How the run is doing, as `ddnn status` says it without asking Slurm, and its model if there is one."""
    status = read_status(path, lambda job: None)
    fields: dict[str, Any] = {"state": status.state, **{k: v for k, v in status.lines().items() if v}}
    if status.problems:
        fields["problems"] = list(status.problems)
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
            fields[name] = format_figures(
                getattr(metrics, name), metrics.combination if name == "last_accepted" else ""
            )
    if metrics.end is not None:
        fields["ended"] = metrics.end.why
    if metrics.starts:
        fields["precision"] = metrics.starts[-1].precision
    if metrics.workers:
        fields["workers"] = metrics.num_workers
    return fields


def _initialization(path: Path) -> dict[str, Any]:
    """The network or RBMs that the training of a recipe starts from, and its frozen layers, if any."""
    from ddnn.recipe.load import load_recipe

    recipe = load_recipe(path, must_exist=False)
    start = recipe.pretrain.dbn if isinstance(recipe.init, str) else recipe.init.model
    fields = {} if start is None else {"started_from": printable(str(start), "")}
    return fields | ({"frozen_layers": list(map(str, recipe.model.freeze))} if recipe.model.freeze else {})


def _recipe(path: Path) -> dict[str, Any]:
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


def _text(line: bytes) -> str:
    return line[:200].decode(errors="replace")


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


def _scp_file(path: Path) -> dict[str, Any]:
    return _scp(read_scp(path, allow_pipes=True))


def _dims(columns: set[int]) -> Any:
    return next(iter(columns)) if len(columns) == 1 else f"different: {', '.join(map(str, sorted(columns)))}"


def _archive(records: Iterator[tuple[str, NDArray[Any]]], *, of_transforms: bool = False) -> dict[str, Any]:
    """Counts of an archive, or of its beginning where it is long. `of_transforms`: by its name; affine ones of one shape
    have no frames."""
    keys: list[str] = []
    columns: set[int] = set()
    shapes: set[tuple[int, ...]] = set()
    frames, size, largest, more = 0, 0, -1, ""
    for key, value in records:
        if size > MAX_SCAN_BYTES:
            more = "at least "
            break
        keys.append(key)
        shapes.add(value.shape)
        frames, size = frames + len(value), size + value.nbytes
        if value.ndim == 2:
            columns.add(value.shape[1])
        elif len(value):
            largest = max(largest, int(value.max()))
    rows, *more_dims = shapes.pop() if len(shapes) == 1 else (0,)
    if of_transforms and more_dims == [rows + 1]:
        return {"transforms": f"{more}{len(keys)} matrices of {rows} x {rows + 1}", "first_keys": _first(keys)}
    counts = {"records": len(keys), "frames": frames, **({} if columns else {"largest_id": largest})}
    fields: dict[str, Any] = {name: f"{more}{count}" if more else count for name, count in counts.items()}
    if columns:
        fields["dims"] = _dims(columns)
    return {**fields, "first_keys": _first(keys)}


def _scoring(path: Path) -> dict[str, Any]:
    choice, wer = read_choice(path), json.loads(_content(path / "score.json")).get("wer")
    figures = {"acoustic_scale": choice.acoustic_scale, "word_insertion_penalty": choice.word_insertion_penalty}
    words = _transcripts(path / "text") if (path / "text").exists() else {}
    return {"wer": wer if isinstance(wer, float) else "unknown", **figures, **words}


def _data_dir(path: Path) -> dict[str, Any]:
    data = read_data_dir(path, allow_pipes=True)
    table = _scp(list(data.entries))
    return {
        "utterances": table.pop("entries"),
        "speakers": "no utt2spk" if data.speakers is None else len(set(data.speakers.values())),
        "cmvn": "no cmvn.scp" if data.cmvn is None else f"statistics of {len(data.cmvn)}",
        **table,
    }


def _alignment_dir(path: Path) -> dict[str, Any]:
    fields = _alignments(path)
    return {**fields, **_transforms(path, fields.get("first_keys", ()))}


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
    shape = [_component(component) for component in components]
    return {"input_dim": components[0].input_dim, "output_dim": components[-1].output_dim, "components": shape}


def _component(component: Component) -> str:
    name = type(component).__name__.removesuffix("Component").lower()
    name = component.kind if isinstance(component, Activation) else name
    networks = component.networks if isinstance(component, ParallelComponent) else ()
    nested = " | ".join(", ".join(map(_component, network)) for network in networks)
    return f"{name} {component.input_dim}-{component.output_dim}" + f" ({nested})" * bool(nested)


def _pdf_counts(path: Path) -> dict[str, Any]:
    counts = read_pdf_counts(path)
    total, added = float(counts.sum()), {}
    if (counts % 1 == 0.5).all():  # as ddnn writes them, after Kaldi's scripts
        total, added = total - 0.5 * len(counts), {"added": "half a frame for each pdf"}
    return {"pdfs": len(counts), "frames": int(total) if total.is_integer() else total, **added}


def _tree(path: Path) -> dict[str, Any]:
    """Kaldi `tree/context-dep.cc`: context width and central position; the leaves are in the event map as `CE pdf`."""
    data = _content(path).removeprefix(b"\0B")
    head = re.match(rb"ContextDependency (?:\x04(.{4})\x04(.{4})|(\d+) (\d+) )", data, re.DOTALL)
    if head is None:
        raise DataError("not a Kaldi tree: ContextDependency and two numbers expected", location=path)
    words = head.groups()[:2] if head[1] else head.groups()[2:]
    width, position = (int.from_bytes(word, "little") if head[1] else int(word) for word in words)
    pattern = rb"CE \x04(.{4})" if head[1] else rb"\bCE (\d+)"
    leaves = (int.from_bytes(n, "little") if head[1] else int(n) for n in re.findall(pattern, data, re.DOTALL))
    return {"pdfs": max(leaves, default=-1) + 1, "context_width": width, "central_position": position}


def _content(path: Path) -> bytes:
    return read_bytes_limited(path, MAX_SCAN_BYTES)


def _table(path: Path) -> dict[str, Any]:
    keys = [key for _, key, _ in read_keyed_lines(path, path.name)]
    return {"entries": len(keys), "first_keys": _first(keys)}


def _utt2spk(path: Path) -> dict[str, Any]:
    speakers = read_utt2spk(path)
    return {"utterances": len(speakers), "speakers": len(set(speakers.values())), "first_keys": _first(speakers)}


def _spk2utt(path: Path) -> dict[str, Any]:
    utterances = {key: len(rest.split()) for _, key, rest in read_keyed_lines(path, "spk2utt")}
    return {"speakers": len(utterances), "utterances": sum(utterances.values()), "first_keys": _first(utterances)}


def _transcripts(path: Path) -> dict[str, Any]:
    words = read_text(path)
    counts = {
        "words": sum(map(len, words.values())),
        "different_words": len({w for line in words.values() for w in line}),
    }
    return {"utterances": len(words), **counts, "first_keys": _first(words)}


def _symbols(path: Path) -> dict[str, Any]:
    symbols = read_symbols(path)
    return {"symbols": len(symbols), "largest_id": max(symbols, default=0)}


def _lines(path: Path) -> dict[str, Any]:
    lines = _content(path).rstrip(b"\n").split(b"\n")
    return {"lines": len(lines), "last": _text(lines[-1])}


def _lang(path: Path) -> dict[str, Any]:
    tables = {
        name: len(read_symbols(path / f"{name}.txt")) for name in ("phones", "words") if (path / f"{name}.txt").exists()
    }
    return {**tables, "files": sorted(file.name for file in path.iterdir())[:20]}


def _nnet1_dir(path: Path) -> dict[str, Any]:
    """The networks of a dir of `ddnn export` or of Kaldi's: name -> input, layer and output dimensions."""
    names = sorted(file.name for pattern in _NNET1_FILES for file in path.glob(pattern))[:20]
    fields: dict[str, Any] = {"networks": [f"{name} {_shape(read_nnet1(path / name))}" for name in names]}
    with suppress(DataError):
        from ddnn.nn.acoustic_model import nnet1_features  # torch, as of `_model`

        features = nnet1_features(path)
        fields |= {} if features is None else {"features": str(features)}
    return {
        **fields,
        **({"pdf_counts": _pdf_counts(path / PDF_COUNTS)["pdfs"]} if (path / PDF_COUNTS).exists() else {}),
    }


def _shape(components: Sequence[Component]) -> str:
    dims = (component.output_dim for component in components if not isinstance(component, Activation))
    return "-".join(map(str, [components[0].input_dim, *dims]))


def _transforms(path: Path, utterances: Sequence[str] = ()) -> dict[str, Any]:
    """The final.mat and trans.* that the features of a Kaldi dir go through, if any; `utterances`: some of its own."""
    try:
        final_mat, files = find_final_mat(path), fmllr_files(path)
        if final_mat is None and not files:
            return {}
        config, keys, size, more = read_transform_config(path), set[str](), 0, ""
        text = config.as_text()
        if final_mat is not None:
            text = text.replace("LDA+MLLT", "LDA+MLLT {} x {}".format(*read_matrix(final_mat).shape))
        for key, matrix in chain.from_iterable(map(iterate_matrices, files)):
            if size > MAX_SCAN_BYTES:
                more = "at least "
                break
            keys.add(key)
            size += matrix.nbytes
        if not files:
            return {"transforms": text}
        kind = "utterance" if keys.intersection(utterances) else "speaker"
        return {"transforms": f"{text} of {more}{plural(len(keys), kind)}"}
    except UserError as error:
        return {"transforms": f"not readable: {error.message} ({error.location})"}


def _lattice_dir(path: Path) -> dict[str, Any]:
    utterances: list[str] = []
    with suppress(UserError, StopIteration):
        utterances = describe_path(next(path.glob("lat.*.gz"))).fields["first_keys"]
    return {
        **_transforms(path, utterances),
        "jobs": len(list(path.glob("lat.*.gz"))),
        "scoring": sorted(file.name for file in path.glob("wer_*"))[:NUM_KEYS],
    }


def _run_dirs(path: Path) -> dict[str, Any]:
    runs = [run.parent for run in sorted(path.glob(f"*/{RECIPE}"))]
    states = [f"{run.name} ({read_status(run, lambda job: None).state})" for run in runs[:50]]
    return {"number": len(runs), "runs": states}


Fields = Callable[[Path], dict[str, Any]]
_POSTERIORS = re.compile(
    # [ pdf weight ... ] of each frame; binary, the number of frames, then pairs with a float
    rb"([^\s\0]+)[ \t]+(?:(\0B\x04.{4}(?:\x04\0{4})*\x04.{4}\x04.{4}\x04.{3}[\x30-\x4f])|\[[^\]\n]*\][ \t]*\[)",
    re.DOTALL,
)
_NNET1_FILES = ("*.nnet", "*.dbn", "final.feature_transform")
_NAMES: tuple[tuple[tuple[str, ...], str, Fields], ...] = (
    (("utt2spk",), "utt2spk of a Kaldi data dir", _utt2spk),
    (("spk2utt",), "spk2utt of a Kaldi data dir", _spk2utt),
    (("text",), "transcripts of a Kaldi data dir", _transcripts),
    (("words.txt", "phones.txt"), "symbol table", _symbols),
    (
        ("segments", "wav.scp", "reco2file_and_channel", "spk2gender", "utt2dur", "utt2num_frames", "stm", "glm"),
        "table of a Kaldi data dir",
        _table,
    ),
    (("cv_utterances", "cv_speakers.txt"), "list for cross-validation", _table),
    (("cmvn_opts", "splice_opts", "delta_opts", "num_jobs"), "setting of a Kaldi experiment", _lines),
    (("train.log", "job.out"), "log of a training", _lines),
)
_SUFFIXES: dict[str, tuple[str, Fields]] = {
    ".safetensors": ("ddnn model", _model),
    ".scp": ("scp", _scp_file),
    ".jsonl": ("metrics of a training", _metrics),
    ".yaml": ("recipe", _recipe),
    ".yml": ("recipe", _recipe),
}
_BEGINNINGS: tuple[tuple[bytes, str, Fields], ...] = (
    (b"\xd6\xfd\xb2\x7e", "OpenFst graph", _fst),
    (b"<TransitionModel>", "Kaldi acoustic model (its transition model)", _transitions),
    (b"ContextDependency", "Kaldi phonetic decision tree", _tree),
    (b"<Topology>", "Kaldi HMM topology", _lines),
    *((token.encode(), "Kaldi nnet1 network", _nnet1) for token in ("<nnet>", *TOKENS)),
)
_DIRECTORIES: tuple[tuple[tuple[str, ...], str, Fields], ...] = (
    ((DBN, "rbm1.safetensors"), "ddnn pretraining dir", _run_dir),
    ((STATUS, FINAL, METRICS, RECIPE), "ddnn run dir", _run_dir),
    (("loglikes.scp",), "log-likelihoods for a Kaldi decoder", lambda path: _scp(read_scp(path / "loglikes.scp"))),
    (("posteriors.scp",), "posteriors or log-posteriors", lambda path: _scp(read_scp(path / "posteriors.scp"))),
    (("activations.scp",), "activations of a layer", lambda path: _scp(read_scp(path / "activations.scp"))),
    (("score.json",), "words and word error rates of ddnn score", _scoring),
    (("feats.scp",), "Kaldi data dir", _data_dir),
    (("HCLG.fst",), "Kaldi graph dir", _graph),
    (("lat.*.gz",), "Kaldi decoding dir (lattices)", _lattice_dir),
    (_NNET1_FILES, "Kaldi nnet1 dir", _nnet1_dir),
    (("final.mdl", "ali.*.gz"), "Kaldi alignment dir", _alignment_dir),
    (("trans.1",), "Kaldi dir of transforms", _transforms),
    (("L.fst", "topo"), "Kaldi lang dir", _lang),
    ((f"*/{RECIPE}",), "folder of ddnn run dirs", _run_dirs),
)
