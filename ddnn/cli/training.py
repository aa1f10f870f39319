"""`ddnn train`, `pretrain`, `evaluate`, `decode-prep`, `align`, `graph`, `denlats`, `score`, `export` and `import-nnet1`:
what makes and uses models."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click
from click import Choice, IntRange, argument, command, echo, option

from ddnn.cli.options import (
    PATH,
    CommandWithSlurm,
    device_option,
    json_option,
    parse_numbers,
    pipes_option,
    print_json,
    print_result,
    recipe_options,
    slurm_options,
    transforms_option,
)
from ddnn.slurm.options import Seeds, SlurmOptions, parse_seeds
from ddnn.training.command import ALLOW_PIPES, TrainingCommand
from ddnn.util.errors import UserError
from ddnn.util.text import fitted, printable, show

MAX_HINTS = 4


class _RecipeCommand(CommandWithSlurm):
    """Where a key of the recipe is given as an option, says how it is set."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [part for word in args for part in word.split("=", 1)]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from ddnn.recipe.keys import keys, keys_called

            given = error.option_name
            name = given.lstrip("-").replace("-", "_")
            meant = keys_called(name)
            if not meant and not any(given in other for other in error.possibilities or ()):
                meant = [key for key in keys() if name in key.rpartition(".")[2]]
            value = words[words.index(given) + 1 :][:1] or ["VALUE"]
            if not 0 < len(meant) <= MAX_HINTS:
                raise
            hint = "keys of the recipe are given by --set: " + " or ".join(f"--set {key}={value[0]}" for key in meant)
            raise UserError("there is no such option", location=given, hint=hint) from error


def _parse_seeds(_: Any, option: click.Parameter, given: tuple[str, ...]) -> Seeds | None:
    if len(given) > 1:
        hint = "give all of them at once, as in --seeds 1,2,3"
        raise UserError(f"given {len(given)} times", location="--seeds", hint=hint)
    return parse_seeds(given[0]) if given else None


class _TrainCommand(_RecipeCommand):
    """Takes `--resume=auto`. As an option with an optional value --resume would take the word after it, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = ["--resume-auto" if word == "--resume=auto" else word for word in args]
        if other := [word for word in args if word.startswith("--resume=")]:
            hint = "a run dir is named by itself: ddnn train RUN_DIR --resume"
            raise UserError("--resume or --resume=auto expected", location=other[0], hint=hint)
        return super().parse_args(ctx, args)


@command(
    cls=_TrainCommand,
    epilog="""\b
    Examples:
      ddnn train recipes/an4/sgd-random.yaml --run-dir exp/an4
      ddnn train my.yaml --set schedule.initial_learning_rate=0.004 --set seed=2 --dry-run
      ddnn train exp/an4 --resume
      ddnn train my.yaml --slurm --cluster gpu --nodes 2 --time 12:00:00
      ddnn train my.yaml --slurm --cluster gpu --seeds 1,2,3""",
)
@recipe_options("Run directory.  [default: exp/NAME OF THE RECIPE]")
@option(
    "--resume",
    flag_value="yes",
    default="no",
    show_default=False,
    help="Resume the run dir's training from its newest checkpoint; --resume=auto starts it if there is none.",
)
@option("--resume-auto", "resume", flag_value="auto", hidden=True)
@option(
    "--seeds",
    metavar="N,N,...",
    multiple=True,
    callback=_parse_seeds,
    help="Train once with each of these seeds, in RUN_DIR-seedN: one after another, or "
    "with --slurm as an array of jobs.",
)
@slurm_options
def train(**options: Any) -> None:
    """Train the network that RECIPE describes. With --resume, RECIPE may be the run dir.

    The run dir must be new or empty, unless --resume is given. Several workers are started by --workers, or by mpirun
    or srun around this command. Exit codes: 0 trained, 2 something to fix, 3 diverged, 75 stopped and resumable.
    """
    _start("training", **options)


@command(
    cls=_RecipeCommand,
    epilog="""\b
    Examples:
      ddnn pretrain my.yaml --run-dir exp/rbm
      ddnn pretrain my.yaml --slurm --cluster gpu --workers 1 --time 12:00:00""",
)
@recipe_options("Directory for the DBN.  [default: exp/NAME OF THE RECIPE-rbm]")
@slurm_options
def pretrain(**options: Any) -> None:
    """Pretrain the DBN that RECIPE describes, and stop.

    A training uses it by pretrain.dbn. The same command resumes a pretraining that was interrupted.
    """
    _start("pretraining", **options)


def _start(
    kind: Literal["training", "pretraining"], settings: tuple[str, ...], allow_pipes: bool, dry_run: bool, no_data: bool,
    slurm: SlurmOptions | None, seeds: Seeds | None = None, **options: Any,
) -> None:  # fmt: skip
    """On this machine or as a Slurm job; with `dry_run` only shows what it would be."""
    if no_data and (not dry_run or slurm is not None):
        where = "with --slurm, which does not look at the data" if dry_run else "without --dry-run"
        raise UserError(f"given {where}", location="--no-data", hint="remove it")
    command = TrainingCommand(kind, settings=settings, **options)
    if allow_pipes:
        command = command.with_setting(ALLOW_PIPES)
    if slurm is not None:
        from ddnn.slurm.submit import submit

        echo(submit(command, slurm, seeds=seeds, dry_run=dry_run).text)
    elif seeds is not None:
        _start_seeds(seeds, command, dry_run, no_data)
    else:
        _start_here(command, dry_run, no_data)


def _start_here(command: TrainingCommand, dry_run: bool, no_data: bool) -> None:
    from ddnn.report import write_run_page
    from ddnn.slurm.recovery import SlurmNodes
    from ddnn.training import start

    if dry_run:
        echo(start.dry_run(command, no_data), nl=False)
    elif message := start.start_training(command, SlurmNodes(), write_run_page):
        echo(printable(message, ""))


def _start_seeds(seeds: Seeds, command: TrainingCommand, dry_run: bool, no_data: bool) -> None:
    """The same training with each of these seeds. The first that fails is the last."""
    if seeds.at_once:
        hint = f"remove %{seeds.at_once}: without --slurm they train one after another"
        raise UserError(f"%{seeds.at_once} without --slurm", location="--seeds", hint=hint)
    for seed, training in seeds.commands(command).items():
        echo(f"{'# ' if dry_run else ''}seed {seed}: {printable(str(training.location), '')}")
        try:
            _start_here(training, dry_run, no_data)
        except (SystemExit, KeyboardInterrupt):
            if len(seeds.numbers) > 1:
                words = ["ddnn", "train", f"--seeds={seeds}", *replace(command, resume="auto").arguments()[1:]]
                echo(f"ddnn: continue all seeds with: {printable(shlex.join(words), '')}", err=True)
            raise
        if dry_run:
            return


@command(epilog="\b\nExample:\n  ddnn evaluate exp/dnn --data data/test --alignments exp/tri4_ali_test --by speaker")
@argument("run_dir", type=PATH)
@option("--data", type=PATH, required=True, help="Kaldi data dir.")
@option("--alignments", type=PATH, required=True, help="Its alignment dir, or an archive of pdf-ids.")
@option(
    "--by",
    type=Choice(["speaker", "utterance"]),
    help="Also show the figures of each speaker or utterance, worst first.",
)
@transforms_option
@device_option
@pipes_option
@json_option
def evaluate(json_: bool, **options: Any) -> None:
    """Compute the loss per frame and the frame accuracy of a trained network, in float32.

    RUN_DIR may also be a model file in it: best.safetensors of a training that has not finished.
    """
    from ddnn.training.model_evaluation import evaluate_run

    print_result(evaluate_run(**options), json_)


@command(
    "decode-prep",
    epilog="""\b
    Examples:
      ddnn decode-prep exp/dnn --data data/test --out exp/dnn/decode_test --jobs 8
      ddnn decode-prep exp/dnn --data data/test --as posteriors --out exp/dnn/post_test
      ddnn decode-prep exp/dnn --data data/test --out - | latgen-faster-mapped ... ark:- ark:lat.ark""",
)
@argument("run_dir", type=PATH)
@option("--data", type=PATH, required=True, help="Kaldi data dir to decode.")
@option("--out", type=PATH, required=True,
        help="Folder for loglikes.ark, loglikes.scp, the counts and decode.sh, or for the archive of --as; "
             "-: write the archive to standard output.")  # fmt: skip
@option("--as", "kind", type=Choice(["log-likelihoods", "posteriors", "log-posteriors", "activations"]),
        default="log-likelihoods", help="What to write for each frame.")  # fmt: skip
@option("--layer", type=IntRange(min=0), help="With --as activations: the layer, counted from 0.")
@option("--prior-scale", type=float, help="Scale of the log-priors that are subtracted.  [default: 1.0]")
@option("--priors", "prior_kind", type=Choice(["class-counts", "posterior-mean"]),
        help="What priors are made of: counts of the training alignment, or the network's posteriors on the training data, "
             "as after sequence training.  [default: class-counts]")  # fmt: skip
@option("--jobs", "--nj", type=IntRange(min=1), default=1, help="CPU processes that compute, a thread each.")
@option(
    "--compress",
    is_flag=True,
    help="Write Kaldi's compressed matrices, which lose precision (docs/how-to/decode-with-kaldi.md).",
)
@option("--compression-method", "method", type=Choice(["1", "2", "3", "5"]),
        help="With --compress: the method, as in Kaldi's copy-feats.  [default: 1]")  # fmt: skip
@transforms_option
@device_option
@pipes_option
def decode_prep(
    run_dir: Path, data: Path, out: Path, compress: bool, method: str | None, **options: Any
) -> None:  # fmt: skip
    """Write log-likelihoods that a Kaldi decoder reads, posteriors, or activations of a hidden layer.

    RUN_DIR may also be a model file in it: best.safetensors of a training that has not finished.
    """
    from ddnn.decoding.prepare import prepare_decoding

    if method is not None and not compress:
        raise UserError("given without --compress", location="--compression-method", hint="add --compress")
    prepare_decoding(run_dir, data, out, **options, compress=int(method or 1) if compress else 0)


@command(
    epilog="""\b
    Example:
      ddnn align exp/dnn --data data/train --lang data/lang --model ali/final.mdl --tree ali/tree --out exp/dnn_ali"""
)
@argument("run_dir", type=PATH)
@option("--data", type=PATH, required=True, help="Kaldi data dir with text.")
@option("--lang", type=PATH, required=True, help="Kaldi lang dir: L.fst, words.txt, oov.int.")
@option("--model", "model_path", type=PATH, required=True, help="The final.mdl of the training alignment.")
@option("--tree", "tree_path", type=PATH, required=True, help="The tree next to it.")
@option("--out", type=PATH, required=True, help="New alignment dir.")
@option("--beam", type=float, default=10.0, help="Beam of the search.")
@option(
    "--retry-beam", type=float, default=40.0, help="Beam for a second try if the first reaches no final state; 0: none."
)
@option("--acoustic-scale", type=float, default=0.1, help="Scale of the log-likelihoods.")
@option("--transition-scale", type=float, default=1.0, help="Scale of transition probabilities but self-loops.")
@option("--self-loop-scale", type=float, default=0.1, help="Scale of the probabilities of self-loops.")
@option("--jobs", "--nj", type=IntRange(min=1), default=1, help="CPU processes, each with an ali.N.gz.")
@transforms_option
@device_option
@pipes_option
@json_option
def align(
    json_: bool, beam: float, retry_beam: float, acoustic_scale: float, transition_scale: float,
    self_loop_scale: float, **options: Any,
) -> None:  # fmt: skip
    """Align transcripts with a trained network, without Kaldi; needs ddnn[decode].

    RUN_DIR may also be a model file in it. The result is an alignment dir as Kaldi's steps/nnet/align.sh writes it.
    """
    from ddnn.decoding import align as alignment

    search = alignment.AlignOptions(beam, retry_beam, acoustic_scale, transition_scale, self_loop_scale)
    print_result(alignment.align(options=search, **options), json_)


@command(
    epilog="""\b
    Example:
      ddnn score exp/an4/decode --graph graph --model ali/final.mdl --text test/text --acoustic-scale 0.07,0.1"""
)
@argument("loglikes", type=PATH)
@option("--graph", "graph_dir", type=PATH, required=True, help="Kaldi graph dir: HCLG.fst and words.txt.")
@option("--model", type=PATH, required=True, help="The final.mdl that the graph was made with.")
@option("--text", type=PATH, required=True, help="The reference: a Kaldi text of the same utterances.")
@option(
    "--acoustic-scale",
    "acoustic_scales",
    callback=parse_numbers,
    help="One or more, with commas between.  [default: 0.05,0.07,0.1,0.143]",
)
@option(
    "--acoustic-scale-from",
    type=PATH,
    help="Use the best acoustic scale and penalty of another scoring, on a development set: its score.json.",
)
@option(
    "--word-insertion-penalty",
    "word_insertion_penalties",
    callback=parse_numbers,
    help="One or more, with commas between, each at every scale.  [default: 0]",
)
@option("--beam", type=float, help="Decoding beam.  [default: 13]")
@option(
    "--out",
    type=PATH,
    help="New folder for the hypotheses at the best scale, text, hyp.trn, ref.trn and hyp.ctm, and for score.json.",
)
@option("--frame-shift", type=float, default=0.01, show_default=True, help="Seconds a frame, for hyp.ctm.")
@option("--jobs", "--nj", type=IntRange(min=1), default=1, help="Processes that decode, each with a copy of the graph.")
@option("--per-utterance", is_flag=True, help="Show the words of each utterance at the best scale.")
@json_option
def score(
    loglikes: Path, acoustic_scale_from: Path | None, acoustic_scales: tuple[float, ...] | None,
    word_insertion_penalties: tuple[float, ...] | None, beam: float | None, per_utterance: bool, json_: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Compute word error rates without Kaldi; needs ddnn[decode]."""
    from ddnn.decoding import score as scoring

    decoding = scoring.decode_options(
        acoustic_scale_from,
        acoustic_scales=acoustic_scales,
        word_insertion_penalties=word_insertion_penalties,
        beam=beam,
    )
    result = scoring.score(loglikes, options=decoding, **options)
    if json_:
        print_json(scoring.as_json(result, alignments=per_utterance))
    else:
        for number, line in enumerate(scoring.render_text(result, alignments=per_utterance).splitlines()):
            show(fitted(line, sys.stdout), sys.stdout, "green" if number == result.best else "")


@command(
    "compare-wer",
    epilog="""\b
    Examples:
      ddnn compare-wer data/test/text exp/sgd/score_test exp/ng-sgd/score_test
      ddnn compare-wer data/test/text exp/tri4/decode/scoring/10.txt exp/dnn/score_test""",
)
@argument("text", type=PATH)
@argument("first", type=PATH)
@argument("second", type=PATH)
@option("--utt2spk", type=PATH, help="Speakers of the utterances.  [default: utt2spk beside TEXT, if there is one]")
@json_option
def compare_wer(text: Path, first: Path, second: Path, utt2spk: Path | None, json_: bool) -> None:
    """Test whether two systems' word error rates differ significantly (paired bootstrap over speakers).

    TEXT is the reference; FIRST and SECOND are the systems' hypotheses: Kaldi texts, or folders written by ddnn score --out.
    Needs ddnn[decode].
    """
    from ddnn.decoding.word_errors import compare_hypotheses

    print_result(compare_hypotheses(text, (first, second), utt2spk), json_)


@command(
    epilog="""\b
    Example:
      ddnn graph --lang data/lang --tree ali/tree --model ali/final.mdl --text data/train/text --out exp/dengraph"""
)
@option("--lang", type=PATH, required=True,
        help="Kaldi lang dir: L_disambig.fst, words.txt, phones/disambig.int, oov.int.")  # fmt: skip
@option("--tree", "tree_path", type=PATH, required=True, help="The tree beside final.mdl.")
@option("--model", "model_path", type=PATH, required=True, help="The final.mdl of the training alignment.")
@option("--text", type=PATH, required=True, help="Transcripts of the training data, a Kaldi text.")
@option("--out", type=PATH, required=True, help="New graph dir.")
@option("--transition-scale", type=float, default=1.0, help="Scale of transition probabilities but self-loops.")
@option("--self-loop-scale", type=float, default=0.1, help="Scale of the probabilities of self-loops.")
@json_option
def graph(json_: bool, **options: Any) -> None:
    """Make the graph of a unigram language model for denlats, without Kaldi; needs ddnn[decode].

    The result is a graph dir as Kaldi's utils/mkgraph.sh leaves it.
    """
    from ddnn.decoding.denominator_graph import make_graph

    print_result(make_graph(**options), json_)


@command(
    epilog="""\b
    Example:
      ddnn denlats exp/an4 --graph graph_denlats --model ali/final.mdl --data train --out exp/an4_denlats"""
)
@argument("run_dir", type=PATH)
@option("--graph", "graph_dir", type=PATH, required=True,
        help="Kaldi graph dir of a weak language model, the unigram of the transcripts: HCLG.fst and words.txt.")  # fmt: skip
@option("--model", "model_path", type=PATH, required=True, help="The final.mdl that the graph was made with.")
@option("--data", type=PATH, required=True, help="Kaldi data dir.")
@option("--out", type=PATH, required=True, help="Folder for lat.scp, its archives, and final.mdl.")
@option("--beam", type=float, default=13.0, help="Decoding beam; there is no max-active.")
@option("--lattice-beam", type=float, default=7.0, help="Cost above the best path up to which paths are kept.")
@option(
    "--acoustic-scale",
    type=float,
    default=0.1,
    help="Scale of log-likelihoods in the search; lattices hold them unscaled.",
)
@option("--raw", is_flag=True, help="Do not determinize: raw_lat.scp, with which training has another criterion.")
@option("--jobs", "--nj", type=IntRange(min=1), default=1, help="CPU processes, a thread each.")
@transforms_option
@device_option
@pipes_option
@json_option
def denlats(
    beam: float, lattice_beam: float, acoustic_scale: float, raw: bool, json_: bool, **options: Any
) -> None:  # fmt: skip
    """Make denominator lattices for sequence training without Kaldi; needs ddnn[decode].

    The same command continues after an interruption.
    """
    from ddnn.decoding.lattices import LatticeOptions, make_lattices

    chosen = LatticeOptions(beam, lattice_beam, acoustic_scale, raw)
    print_result(make_lattices(**options, options=chosen), json_)


@command(epilog="\b\nExample:\n  ddnn export exp/dnn --out exp/dnn/nnet1")
@argument("run_dir", type=PATH)
@option("--format", type=Choice(["nnet1"]), default="nnet1", show_default=False, expose_value=False,
        help="Only nnet1 so far.")  # fmt: skip
@option("--out", type=PATH, required=True, help="Folder for final.nnet and its feature transform.")
@option("--text", is_flag=True, help="Write text instead of binary: 7 digits, to be read by people.")
def export(run_dir: Path, out: Path, text: bool) -> None:
    """Write a trained network as Kaldi nnet1 files, as steps/nnet/decode.sh reads them beside a final.mdl.

    RUN_DIR may also be a model file in it: best.safetensors of a training that has not finished.
    """
    from ddnn.decoding.prepare import export_nnet1

    export_nnet1(run_dir, out, text=text)


@command(
    "import-nnet1",
    epilog="""\b
    Examples:
      ddnn import-nnet1 exp/dnn5b_pretrain-dbn_dnn --out exp/imported
      ddnn import-nnet1 final.nnet --feature-transform tr.nnet --pdf-counts counts --out exp/imported""",
)
@argument("nnet", type=PATH)
@option("--feature-transform", type=PATH, help="nnet1 file of splice, shift and scale before the network.")
@option("--pdf-counts", type=PATH, help="nnet1's ali_train_pdf.counts; decode-prep needs them.")
@option("--out", type=PATH, required=True, help="Run dir to create.")
def import_nnet1(nnet: Path, feature_transform: Path | None, pdf_counts: Path | None, out: Path) -> None:
    """Create a run dir from a Kaldi nnet1 network: its file, or a directory.

    A directory is one of `ddnn export`, or Kaldi's, with final.nnet, its feature transform, pdf counts and options.
    """
    from ddnn.decoding import prepare

    prepare.import_nnet1(nnet, feature_transform, out, pdf_counts)
