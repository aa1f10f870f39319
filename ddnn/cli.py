"""The `ddnn` command: each subcommand imports what it needs and calls one function. No logic here.

Exit codes: 0 success; 2 something the user must mend, said in one message on stderr; 75 stopped by a signal, to be
resumed; 130 interrupted; 1 anything else.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import click

from ddnn import __version__
from ddnn.errors import UserError
from ddnn.slurm.options import SlurmOptions, slurm_options

PATH = click.Path(path_type=Path)
DEVICE = click.Choice(["cpu", "cuda", "auto"])

on_device = click.option("--device", type=DEVICE, default="auto", show_default=True, help="Where to compute.")
allowing_pipes = click.option("--allow-pipes", is_flag=True, help="Run shell commands in an scp (only your own!).")
as_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


class _InOrder(click.Group):
    """Lists the commands in the order in which one uses them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
    Examples:
      ddnn synth demo/corpus --hours 0.3            a corpus from nothing
      ddnn train recipes/demo/demo.yaml             -> exp/demo
      ddnn evaluate exp/demo --data demo/corpus/test --alignments demo/corpus/ali_test
      ddnn decode-prep exp/demo --data demo/corpus/test --out exp/demo/decode

    \b
    Each command has --help. Recipes: docs/recipe.md. Completion: ddnn completion --help.""",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Train hybrid DNN-HMM acoustic models on Kaldi features and alignments."""


@cli.command(
    epilog="""\b
    Examples:
      ddnn train recipes/an4/sgd-random.yaml --run-dir exp/an4
      ddnn train my.yaml --set schedule.initial=0.004 --set seed=2 --dry-run
      ddnn train exp/an4 --resume
      ddnn train my.yaml --slurm --cluster gpu --nodes 2 --time 12:00:00"""
)
@click.argument("recipe", type=PATH)
@click.option("--run-dir", type=PATH, help="Where everything goes.  [default: exp/NAME OF THE RECIPE]")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe; repeatable.")
@click.option("--workers", type=int, help="The same as --set parallel.workers=N.")
@on_device
@click.option("--dry-run", is_flag=True, help="Check the recipe, print it as resolved, train nothing.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of the run dir, if it has one.")
@slurm_options
def train(
    recipe: Path, run_dir: Path | None, settings: tuple[str, ...], workers: int | None, device: str, dry_run: bool,
    resume: bool, slurm: SlurmOptions | None,
) -> None:  # fmt: skip
    """Train a network as RECIPE says. With --resume, RECIPE may be the run dir."""
    if slurm is not None:
        from ddnn.slurm.submit import submit_training

        run_dir = run_dir or (recipe if resume and recipe.is_dir() else Path("exp", recipe.stem))
        sent = submit_training(recipe, run_dir, settings, workers, device, slurm, dry_run=dry_run, resume=resume)
        click.echo(sent.text)
        return
    if dry_run:
        _show_recipe(recipe, settings, workers)
        return
    from ddnn.train.start import start_training

    said = start_training(recipe, run_dir, settings, workers, device, resume)
    if said is not None:
        click.echo(said)


@cli.command(
    epilog="""\b
    Examples:
      ddnn pretrain my.yaml --run-dir exp/rbm
      ddnn pretrain my.yaml --slurm --cluster gpu --workers 1 --time 12:00:00"""
)
@click.argument("recipe", type=PATH)
@click.option("--run-dir", type=PATH, help="Gets the stack.  [default: exp/NAME OF THE RECIPE-rbm]")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe; repeatable.")
@click.option("--workers", type=int, help="The same as --set parallel.workers=N.")
@on_device
@click.option("--dry-run", is_flag=True, help="Check the recipe, print it as resolved, train nothing.")
@slurm_options
def pretrain(
    recipe: Path, run_dir: Path | None, settings: tuple[str, ...], workers: int | None, device: str, dry_run: bool,
    slurm: SlurmOptions | None,
) -> None:  # fmt: skip
    """Train the stack of RBMs of RECIPE alone.

    A later training takes it by pretrain.from. One that was broken off goes on where it was.
    """
    if slurm is not None:
        from ddnn.slurm.submit import submit_pretraining

        run_dir = run_dir or Path("exp", f"{recipe.stem}-rbm")
        click.echo(submit_pretraining(recipe, run_dir, settings, workers, device, slurm, dry_run=dry_run).text)
        return
    if dry_run:
        _show_recipe(recipe, settings, workers)
        return
    from ddnn.train.start import start_pretraining

    start_pretraining(recipe, run_dir, settings, workers, device)


@cli.command()
@click.argument("run_dir", type=PATH)
@click.option("--data", type=PATH, required=True, help="Kaldi data dir.")
@click.option("--alignments", type=PATH, required=True, help="Its alignment dir, or an archive of pdf-ids.")
@on_device
@allowing_pipes
@as_json
def evaluate(run_dir: Path, data: Path, alignments: Path, device: str, allow_pipes: bool, json_: bool) -> None:
    """Loss per frame and frame accuracy of a trained network."""
    from ddnn.train.evaluate import evaluate_run

    _show(evaluate_run(run_dir, data, alignments, device=device, allow_pipes=allow_pipes), json_)


@cli.command("decode-prep")
@click.argument("run_dir", type=PATH)
@click.option("--data", type=PATH, required=True, help="Kaldi data dir to decode.")
@click.option("--out", type=PATH, required=True, help="Gets loglikes.ark, loglikes.scp, the counts, decode.sh.")
@click.option("--prior-scale", type=float, default=1.0, show_default=True, help="Scale of the log-priors taken off.")
@on_device
@allowing_pipes
def decode_prep(run_dir: Path, data: Path, out: Path, prior_scale: float, device: str, allow_pipes: bool) -> None:
    """Write log-likelihoods that a Kaldi decoder reads."""
    from ddnn.decode.prepare import prepare_decoding

    prepare_decoding(run_dir, data, out, device=device, prior_scale=prior_scale, allow_pipes=allow_pipes)


@cli.command(
    epilog="""\b
    Example:
      ddnn score exp/an4/decode --graph graph --model ali/final.mdl --text test/text --acoustic-scale 0.07,0.1"""
)
@click.argument("loglikes", type=PATH)
@click.option("--graph", type=PATH, required=True, help="Kaldi graph dir: HCLG.fst and words.txt.")
@click.option("--model", type=PATH, required=True, help="The final.mdl that the graph was made with.")
@click.option("--text", type=PATH, required=True, help="The reference: a Kaldi text of the same utterances.")
@click.option("--acoustic-scale", default="0.05,0.07,0.1,0.143", show_default=True, help="One or more, by commas.")
@click.option("--beam", type=float, help="Decoding beam.  [default: 13]")
@click.option("--per-utterance", is_flag=True, help="Show the words of each utterance at the best scale.")
@as_json
def score(
    loglikes: Path, graph: Path, model: Path, text: Path, acoustic_scale: str, beam: float | None, per_utterance: bool,
    json_: bool,
) -> None:  # fmt: skip
    """Word error rate without Kaldi; needs ddnn[decode]."""
    from ddnn.decode import score as scoring
    from ddnn.decode.decoder import DecodeOptions

    scales = _numbers(acoustic_scale, "--acoustic-scale")
    options = DecodeOptions(scales) if beam is None else DecodeOptions(scales, beam=beam)
    result = scoring.score(loglikes, graph_dir=graph, model=model, text=text, options=options)
    if json_:
        _show_json(scoring.as_json(result, alignments=per_utterance))
    else:
        click.echo(scoring.render_text(result, alignments=per_utterance), nl=False)


@cli.command()
@click.argument("run_dir", type=PATH)
@click.option("--format", "format_", type=click.Choice(["nnet1"]), default="nnet1", help="Only nnet1 so far.")
@click.option("--out", type=PATH, required=True, help="Gets final.nnet and feature_transform.nnet.")
def export(run_dir: Path, format_: str, out: Path) -> None:
    """Write a trained network as Kaldi nnet1 files."""
    from ddnn.train.nnet1_command import export_nnet1

    export_nnet1(run_dir, out)


@cli.command("import-nnet1")
@click.argument("nnet", type=PATH)
@click.option("--feature-transform", type=PATH, help="nnet1 file of splice, shift and scale before the network.")
@click.option("--pdf-counts", type=PATH, help="nnet1's ali_train_pdf.counts; decode-prep needs them.")
@click.option("--out", type=PATH, required=True, help="Run dir to make.")
def import_nnet1(nnet: Path, feature_transform: Path | None, pdf_counts: Path | None, out: Path) -> None:
    """Make a run dir from a Kaldi nnet1 network."""
    from ddnn.train import nnet1_command

    nnet1_command.import_nnet1(nnet, feature_transform, out, pdf_counts)


@cli.command()
@click.argument("path", type=PATH)
@as_json
def info(path: Path, json_: bool) -> None:
    """Say what PATH is, in a glance."""
    from ddnn.info import describe_path

    _show(describe_path(path), json_)


@cli.command(epilog="\b\nExample:\n  ddnn status exp/an4 --follow && ddnn evaluate exp/an4 ...")
@click.argument("run_dir", type=PATH)
@click.option("--follow", is_flag=True, help="Again every few seconds, until it ends; exit code 1 where it stopped.")
@as_json
def status(run_dir: Path, follow: bool, json_: bool) -> None:
    """Say how a training is doing."""
    from ddnn.info.follow import follow_status
    from ddnn.info.status import read_status

    if not follow:
        _show(read_status(run_dir), json_)
        return
    ended = follow_status(run_dir, click.echo, terminal=sys.stdout.isatty(), as_json=json_)
    sys.exit(1 if ended.state == "stopped" else 0)


@cli.command(epilog="\b\nExample:\n  ddnn synth demo/corpus --hours 0.3 --speakers 20")
@click.argument("out_dir", type=PATH)
@click.option("--hours", type=float, default=0.3, show_default=True, help="Hours of speech to train on.")
@click.option("--speakers", type=int, default=20, show_default=True, help="Speakers in the training data.")
@click.option("--dim", type=int, default=40, show_default=True, help="Feature dims.")
@click.option("--pdfs", type=int, default=160, show_default=True, help="Senones.")
@click.option("--seed", type=int, default=1, show_default=True, help="Same seed: the same corpus.")
def synth(out_dir: Path, hours: float, speakers: int, dim: int, pdfs: int, seed: int) -> None:
    """Write a synthetic corpus in Kaldi's formats."""
    from ddnn.progress import frame_counter
    from ddnn.synth.corpus import SynthOptions, synthesise

    options = SynthOptions(hours=hours, speakers=speakers, dim=dim, pdfs=pdfs, seed=seed)
    with frame_counter("synth", options.expected_frames) as bar:
        made = synthesise(out_dir, options, progress=lambda frames: _count(bar, frames))
    click.echo(f"{out_dir}: {made.train_utterances} utterances to train on, {made.test_utterances} to test")


@cli.group(cls=_InOrder)
def convert() -> None:
    """Make Kaldi data dirs of other formats."""


@convert.command(
    epilog="\b\nExample:\n  ddnn convert idx --images train-images-idx3-ubyte.gz --labels train-labels-idx1-ubyte.gz "
    "--out train"
)
@click.option("--images", type=PATH, required=True, help="IDX file of images (unsigned bytes), plain or gzip.")
@click.option("--labels", type=PATH, required=True, help="IDX file of their labels.")
@click.option("--out", type=PATH, required=True, help="Data dir to make; its pdfs.ark holds the labels.")
@click.option("--name", default="image", show_default=True, help="What the utterance ids begin with.")
@click.option("--speakers", default=100, show_default=True, help="Equal runs of images, to hold some out.")
@click.option("--utterance", default=100, show_default=True, help="Most images in an utterance.")
def idx(images: Path, labels: Path, out: Path, name: str, speakers: int, utterance: int) -> None:
    """Images as frames, labels as pdf-ids: train on them with data.splice: 0."""
    from ddnn.convert.images import ConvertOptions, convert_idx

    click.echo(f"{out}: {convert_idx(images, labels, out, ConvertOptions(name, speakers, utterance))}")


@cli.command()
@click.option(
    "--network",
    "networks",
    type=click.Choice(["an4", "swbd"]),
    multiple=True,
    default=("an4",),
    show_default=True,
    help="What to measure; repeatable.",
)
@click.option("--device", type=DEVICE, default="cpu", show_default=True, help="Where to compute.")
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads.")
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(["float32", "bf16"]),
    multiple=True,
    help="Of the products; repeatable.  [default: float32, and of one worker bf16 where precision: auto would take it]",
)
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Time for each network.")
@click.option("--workers", type=click.IntRange(min=1), default=1, help="Measure so many that average against one.")
@click.option("--reduce", default="all-reduce", show_default=True, help="With --workers: parallel.reduce of a recipe.")
@click.option("--every", type=int, default=10, show_default=True, help="With --workers: parallel.every.")
@click.option("--overlap", is_flag=True, help="With --workers: parallel.overlap.")
@as_json
def bench(
    networks: tuple[str, ...], device: str, threads: int, precisions: tuple[Literal["float32", "bf16"], ...],
    seconds: float, workers: int, reduce: str, every: int, overlap: bool, json_: bool,
) -> None:  # fmt: skip
    """Measure the training step against the machine's GEMM limit, or several workers against one."""
    if workers > 1:
        from ddnn.bench.workers import run_bench_workers

        options = {"workers": workers, "reduce": reduce, "every": every, "overlap": overlap, "threads": threads}
        run_bench_workers(networks, options, device, seconds, precisions, json_, lambda result: _show(result, json_))
        return
    from ddnn.bench.step import run_bench

    _show(run_bench(networks, device=device, threads=threads, seconds=seconds, precisions=precisions), json_)


@cli.command(
    epilog="""\b
    Examples:
      ddnn reproduce table6 --corpus an4 --workers 1 --seeds 1 --dry-run
      ddnn reproduce table6 --corpus an4
      ddnn reproduce table6 --corpus an4 --only-report --records docs/results/an4/records --report exp/t6
      cd egs/swbd/s5c && ddnn reproduce table1 --corpus swbd --slurm --cluster gpu"""
)
@click.argument("tables", nargs=-1, required=True)
@click.option(
    "--corpus",
    default="an4",
    show_default=True,
    help="NAME of recipes/NAME, here or in ddnn's checkout; or a folder with a reproduce.yaml, or that file.",
)
@click.option("--out", type=PATH, help="Gets run dirs, stacks of RBMs and logs.  [default: exp/reproduce/CORPUS]")
@click.option("--records", type=PATH, help="Folder of what came of each run, a file each.  [default: OUT/records]")
@click.option("--report", type=PATH, help="Writes REPORT.md, REPORT.html, plots into REPORT/.  [default: OUT/report]")
@click.option("--seeds", help="Run only these of the corpus, as 1,2; the report has all.")
@click.option("--workers", help="Run only these sizes, as 1,16; the report has all.")
@click.option(
    "--cores", type=click.IntRange(min=1), help="Cores that runs side by side share, a worker on each.  [default: all]"
)
@on_device
@click.option("--dry-run", is_flag=True, help="Say what would be run and what is missing; run nothing, write nothing.")
@click.option("--only-report", is_flag=True, help="Write the report of the records that there are, run nothing.")
@click.option("--again", is_flag=True, help="Run those again too that diverged; else that is their result.")
@as_json
@slurm_options
def reproduce(
    tables: tuple[str, ...], seeds: str | None, workers: str | None, json_: bool, **options: Any
) -> None:  # fmt: skip
    """Train the tables of arXiv 1507.01239 on a corpus: table1 to table6, figure2, reduce, all.

    What is missing is run, with --slurm as jobs; the same call goes on after a break, looks what became of the jobs,
    and runs nothing once all is there.
    """
    from ddnn.reproduce import command

    only_seeds = None if seeds is None else _sizes(seeds, "--seeds")
    only_sizes = None if workers is None else _sizes(workers, "--workers")
    chosen = command.Options(seeds=only_seeds, workers=only_sizes, **options)
    found = command.reproduce(tables, chosen, lambda line: click.echo(line, err=True))
    _show(found, json_)
    command.check(found)


@cli.command(epilog="\b\nExample:\n  ddnn report exp/one exp/four --out exp/compared")
@click.argument("run_dirs", type=PATH, nargs=-1, required=True)
@click.option("--out", type=PATH, default=Path("report"), show_default=True, help="Gets the plots, as PNG files.")
@click.option("--no-plots", is_flag=True, help="Draw nothing; plots need ddnn[report].")
@as_json
def report(run_dirs: tuple[Path, ...], out: Path, no_plots: bool, json_: bool) -> None:
    """Compare trainings: accuracy, speed, where the time went."""
    from ddnn.report import table

    _show(table.report(run_dirs, None if no_plots else out), json_)


@cli.command(
    epilog="""\b
    Examples:
      ddnn scale --measured exp/one,exp/two --workers 1,2,4,8
      ddnn scale --measured k20-switchboard.yaml --fit 1,2,4 --out scaling"""
)
@click.option("--measured", required=True, help="Run dirs, or YAML files of times (docs/scaling.md), by commas.")
@click.option("--workers", default="1,2,4,8,16,32,64,128,256,512,1024", show_default=True, help="Sizes to predict.")
@click.option("--network", help="Another network: its dims, as 440-6x2048-8806.")
@click.option("--minibatch", type=int, help="Another minibatch.")
@click.option("--every", type=int, help="Other minibatches between averagings.")
@click.option("--frames", type=float, help="Other frames in an epoch.")
@click.option("--hours", type=float, help="The same in hours of 360,000 frames.")
@click.option("--fit", help="Fit to these sizes only, and predict the others.  [default: all]")
@click.option("--latency", type=float, help="Seconds of a message, instead of the fitted.")
@click.option("--bandwidth", type=float, help="Bytes a second, instead of the fitted.")
@click.option("--wire", type=click.Choice(["float32", "bfloat16"]), help="Type that is sent.  [default: as measured]")
@click.option("--out", type=PATH, help="Gets scaling.png; needs ddnn[report].")
@as_json
def scale(measured: str, workers: str, fit: str | None, out: Path | None, json_: bool, **job: Any) -> None:
    """Predict the speed-up of more workers from measured runs."""
    from ddnn.report import scale_command

    sizes, fit_sizes = _sizes(workers, "--workers"), None if fit is None else _sizes(fit, "--fit")
    options = scale_command.ScaleOptions(workers=sizes, fit=fit_sizes, **job)
    _show(scale_command.scale([Path(part) for part in measured.split(",")], options, out), json_)


@cli.command(
    epilog="""\b
    Examples:
      echo 'eval "$(ddnn completion bash)"' >> ~/.bashrc
      ddnn completion fish > ~/.config/fish/completions/ddnn.fish"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "ddnn", "_DDNN_COMPLETE").source())


def _show_recipe(path: Path, settings: tuple[str, ...], workers: int | None) -> None:
    from ddnn.recipe.load import dump_recipe, load_recipe
    from ddnn.train.command import describe

    loaded = load_recipe(path, (*settings, *(() if workers is None else (f"parallel.workers={workers}",))))
    click.echo(f"# {describe(loaded)}\n{dump_recipe(loaded)}", nl=False)


def _count(bar: Any, frames: int) -> None:
    bar.update(frames)


def _show(result: Any, json_: bool) -> None:
    if json_:
        _show_json(result.as_dict())
    else:
        click.echo(result.as_text())


def _show_json(value: Any) -> None:
    import json

    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        expected = f"{text!r} found, expected numbers with commas between"
        raise UserError(expected, where=option, mend=f"give them as in {option} 1,2,4") from error


def _sizes(text: str, option: str) -> tuple[int, ...]:
    numbers = _numbers(text, option)
    if not all(number.is_integer() for number in numbers):
        expected = f"{text!r} found, expected whole numbers with commas between"
        raise UserError(expected, where=option, mend=f"give them as in {option} 1,2,4")
    return tuple(int(number) for number in numbers)


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    print(f"ddnn: this is a bug in ddnn {__version__}; please report it with the lines above", file=sys.stderr)


def main() -> None:
    """Entry point of `ddnn`: runs the command and turns what went wrong into a message and an exit code."""
    sys.excepthook = _report_bug
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("ddnn").setLevel(logging.INFO)
    try:
        code = cli.main(prog_name="ddnn", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        print("ddnn: interrupted", file=sys.stderr)
        sys.exit(130)
    except UserError as error:
        print(f"ddnn: error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk behind stdout, a folder that may not be entered
        where = "" if error.filename is None else f"\n  where: {error.filename}"
        print(f"ddnn: error: cannot read or write: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(2)
    except UnicodeEncodeError as error:  # a name from the file system in another encoding
        found = error.object[max(error.start - 100, 0) : error.end + 20]
        print(f"ddnn: error: a name is not UTF-8\n  where: {found!r}", file=sys.stderr)
        print("  mend:  rename the file or folder, with convmv for example", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:  # torch's way to say it, on CPU and GPU
        if not re.search("can't allocate memory|out of memory", str(error)):
            raise
        print(f"ddnn: error: {str(error).splitlines()[0]}\n  mend:  a smaller network or minibatch", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print("ddnn: error: out of memory\n  mend:  data.store: float16, or a larger machine", file=sys.stderr)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
