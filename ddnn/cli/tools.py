"""`ddnn info`, `status`, `synth`, `bench`, `reproduce`, `report` and `scale`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from click import Choice, IntRange, argument, command, echo, option

from ddnn.cli.options import (
    DEVICES,
    PATH,
    CommandWithSlurm,
    device_option,
    json_option,
    parse_sizes,
    print_json,
    print_result,
    slurm_options,
)
from ddnn.util.errors import UserError
from ddnn.util.text import fitted, printable


@command(epilog="\b\nExample:\n  ddnn info data/train exp/tri4_ali exp/dnn")
@argument("paths", type=PATH, nargs=-1, required=True)
@json_option
def info(paths: tuple[Path, ...], json_: bool) -> None:
    """Describe each of PATHS: a run dir, a model, a data dir, an alignment, a graph.

    With --json several paths are a list.
    """
    from ddnn.inspection.path import describe_path

    if json_ and len(paths) > 1:
        print_json([describe_path(path).as_dict() for path in paths])
        return
    for path in paths:
        print_result(describe_path(path), json_)


@command(
    epilog="""\b
    Examples:
      ddnn status exp/an4 --follow && ddnn evaluate exp/an4 ...
      ddnn status exp/an4-seed*"""
)
@argument("run_dirs", type=PATH, nargs=-1, required=True)
@option("--follow", is_flag=True, help="Refresh every few seconds until the run ends. Exit code 1 unless it finished.")
@json_option
def status(run_dirs: tuple[Path, ...], follow: bool, json_: bool) -> None:
    """Show the state of a training run, or one line for each of several runs or of the runs in a folder.

    With --json, several runs are printed as a list.
    """
    from ddnn.inspection.status import follow_status, read_statuses

    if not follow:
        result = read_statuses(run_dirs)
        for line in () if json_ else result.as_text().splitlines():
            echo(line if line.startswith("  resume ") else fitted(line, sys.stdout))  # a command is to be copied whole
        if json_:
            print_json(result.as_dict())
        return
    if len(run_dirs) > 1:
        raise UserError("several run dirs found, expected one", location="--follow", hint="leave out --follow")
    ended = follow_status(run_dirs[0], echo, terminal=sys.stdout.isatty(), as_json=json_)
    sys.exit(0 if ended.state == "finished" else 1)


@command(epilog="\b\nExample:\n  ddnn synth demo/corpus --hours 0.3 --speakers 20")
@argument("out_dir", type=PATH)
@option("--hours", type=float, default=0.3, help="Hours of speech to train on.")
@option("--speakers", type=int, default=20, help="Speakers in the training data.")
@option("--features", type=Choice(["gaussian", "fbank"]), default="gaussian",
        help="How frames are generated: a draw from Gaussians, or a log-mel spectrum whose formants each speaker shifts in "
             "frequency.")  # fmt: skip
@option("--dim", type=int, default=40, help="Feature dimension; with --features fbank, the number of bands.")
@option("--pdfs", type=int, default=160, help="Senones.")
@option("--seed", type=int, default=1, help="Random seed; the same seed gives the same corpus.")
def synth(out_dir: Path, **options: Any) -> None:
    """Write a synthetic corpus in Kaldi's formats.

    Paths in feats.scp are relative to its folder, so the corpus can be moved; run Kaldi's tools in that folder.
    """
    from ddnn.synth.corpus import SynthOptions, synthesize
    from ddnn.util.progress import frame_counter

    corpus = SynthOptions(**options)
    with frame_counter("synth", corpus.expected_frames) as advance:
        written = synthesize(out_dir, corpus, progress=advance)
    echo(
        f"{printable(str(out_dir), '')}: {written.train_utterances} utterances to train on, {written.test_utterances} to test"
    )


@command(
    epilog="""\b
    Examples:
      ddnn bench --minibatch-size 64,256,1024 --plain
      ddnn bench --workers 2 --strategy butterfly --overlap"""
)
@option("--network", "networks", type=Choice(["an4", "swbd", "cnn"]), multiple=True, default=("an4",),
        help="What to measure; repeatable.")  # fmt: skip
@option("--device", type=DEVICES, default="cpu", help="Where to compute.")
@option("--threads", type=int, default=1, help="CPU threads.")
@option("--precision", "precisions", type=Choice(["float32", "bf16"]), multiple=True,
        help="Precision of the matrix products; repeatable.  [default: float32, and of one worker bf16 where "
             "precision: auto would take it]")  # fmt: skip
@option(
    "--minibatch-size",
    "minibatches",
    callback=parse_sizes,
    help="Sizes to measure, as 64,256,1024.  [default: the network's]",
)
@option("--seconds", type=float, default=20.0, help="Time for each network and minibatch size.")
@option("--workers", type=IntRange(min=1), default=1, show_default=False,
        help="Compare this number of averaging workers with one.")  # fmt: skip
@option("--strategy", default="all-reduce", help="With --workers: parallel.strategy of a recipe.")
@option("--averaging-period", type=int, default=10, help="With --workers: parallel.averaging_period.")
@option("--overlap", is_flag=True, help="With --workers: parallel.overlap.")
@option("--plain", is_flag=True, help="Also a training loop in plain PyTorch: modules, autograd, torch.optim.SGD.")
@option("--out", type=PATH, help="Folder for minibatch-size.png; needs ddnn[report].")
@json_option
def bench(
    workers: int, strategy: str, averaging_period: int, overlap: bool, out: Path | None, json_: bool, **options: Any
) -> None:
    """Measure the training step against the machine's GEMM limit, or the cost of averaging between workers."""
    if workers == 1:
        from ddnn.bench.step import run_bench

        result = run_bench(**options)
        print_result(result, json_)
        if out is not None:
            from ddnn.report.figures import draw_speeds

            echo(f"plot: {printable(str(draw_speeds(result.speeds(), out / 'minibatch-size.png')), '')}", err=True)
        return
    alone = {"--plain": options.pop("plain"), "--minibatch-size": options.pop("minibatches"), "--out": out}
    if wrong := [name for name, value in alone.items() if value]:
        raise UserError("not measured with several workers", location=wrong[0], hint="omit --workers, or this option")
    from ddnn.bench.workers import run_bench_workers

    parallel = {"workers": workers, "strategy": strategy, "averaging_period": averaging_period, "overlap": overlap}
    parallel["cpu_threads"] = options.pop("threads")
    run_bench_workers(parallel, sys.argv[1:], lambda result: print_result(result, json_), **options)


@command(
    cls=CommandWithSlurm,
    epilog="""\b
    Examples:
      ddnn reproduce table6 --corpus an4 --workers 1 --seeds 1 --dry-run
      ddnn reproduce table6 --corpus an4
      ddnn reproduce table6 --corpus an4 --report-only --records docs/results/an4/records --report exp/t6
      cd egs/swbd/s5c && ddnn reproduce table1 --corpus swbd --slurm --cluster gpu""",
)
@argument("tables", nargs=-1, required=True)
@option("--corpus", default="an4",
        help="NAME of recipes/NAME, here or in ddnn's checkout; or a folder with a reproduce.yaml, or that file.")  # fmt: skip
@option("--out", type=PATH, help="Folder of run dirs, RBMs and logs.  [default: exp/reproduce/CORPUS]")
@option("--records", type=PATH, help="Folder of the results of the runs, a file each.  [default: OUT/records]")
@option("--report", type=PATH, help="Writes REPORT.md, REPORT.html, plots into REPORT/.  [default: OUT/report]")
@option("--seeds", callback=parse_sizes, help="Execute only these seeds of the corpus, as 1,2; the report has all.")
@option("--workers", callback=parse_sizes, help="Execute only these numbers of workers, as 1,16; the report has all.")
@option("--conditions", callback=lambda _, __, names: names and tuple(names.split(",")),
        help="Execute only these conditions, as base,sgd; the report has all.")  # fmt: skip
@option("--cores", type=IntRange(min=1), help="Cores that runs share, a worker on each.  [default: all]")
@device_option
@option("--dry-run", is_flag=True, help="Show what is missing and would be executed; write nothing.")
@option("--report-only", is_flag=True, help="Write the report of the existing records, execute nothing.")
@option("--retry-diverged", is_flag=True, help='Rerun diverged runs instead of keeping "diverged" as their result.')
@json_option
@slurm_options
def reproduce(tables: tuple[str, ...], json_: bool, **options: Any) -> None:
    """Reproduce the tables of arXiv 1507.01239 on a corpus: table1 to table6, figure2, reduce, schemes, convnets, all.

    Executes the runs that are missing, with --slurm as jobs. The same command resumes after an interruption, checks
    what became of the jobs, and executes nothing once all runs are recorded.
    """
    from ddnn.reproduce import command

    result = command.reproduce(tables, command.Options(**options), lambda line: echo(line, err=True))
    print_result(result, json_)
    result.raise_errors()


@command(epilog="\b\nExample:\n  ddnn report exp/one exp/four --html compared.html")
@argument("run_dirs", type=PATH, nargs=-1, required=True)
@option("--html", type=PATH, metavar="FILE", help="Write a page with table and curves, and no PNG files without --out.")
@option("--out", type=PATH, help="Folder for the plots, PNG files.  [default: report]")
@option("--no-plots", is_flag=True, help="Draw no plots; they need ddnn[report].")
@option(
    "--csv", "runs_csv", type=PATH, metavar="FILE|-", help="Write a row for each run, figures in full; -: print it."
)
@option("--csv-epochs", type=PATH, metavar="FILE|-", help="Write a row for each epoch of each run; -: print it.")
@json_option
def report(
    run_dirs: tuple[Path, ...], html: Path | None, out: Path | None, no_plots: bool, runs_csv: Path | None,
    csv_epochs: Path | None, json_: bool,
) -> None:  # fmt: skip
    """Compare trainings: accuracy, results on test sets, speed, where the time went.

    Results are those of `ddnn evaluate --json` and `ddnn score --json` that were saved in a run dir or in a folder of it,
    as RUN_DIR/decode_test/score.json.
    """
    from ddnn.report import page, table

    files, printed = {"--csv": runs_csv, "--csv-epochs": csv_epochs}, Path("-")
    on_stdout = [name for name, path in files.items() if path == printed]
    if json_:
        on_stdout.append("--json")
    if runs_csv is not None and runs_csv == csv_epochs != printed:
        raise UserError(f"{runs_csv} named twice", location="--csv, --csv-epochs", hint="name two files")
    if len(on_stdout) > 1 and printed in files.values():
        raise UserError(
            f"{' and '.join(on_stdout)} would both be printed", location="the command line", hint="name a file"
        )
    to_files = [None if path == printed else path for path in files.values()]
    without = no_plots or printed in files.values() or (html is not None and out is None)
    result = table.report(run_dirs, None if without else out or Path("report"), *to_files)
    if html is not None:
        result = page.write_page(result, html)
    if printed not in files.values():
        print_json(result.as_dict()) if json_ else echo(fitted(result.as_text(), sys.stdout))
    else:
        echo(result.runs_csv() if runs_csv == printed else result.epochs_csv(), nl=False)


@command(
    epilog="""\b
    Examples:
      ddnn scale --measured exp/one,exp/two --workers 1,2,4,8
      ddnn scale --measured k20-switchboard.yaml --fit 1,2,4 --out scaling"""
)
@option(
    "--measured",
    required=True,
    help="Run dirs, or YAML files of times (docs/how-to/predict-speed-up.md), with commas between.",
)
@option("--workers", default="1,2,4,8,16,32,64,128,256,512,1024", callback=parse_sizes,
        help="Numbers of workers to predict.")  # fmt: skip
@option("--layouts", help="Workers that share a model: replicas x columns x stages, as 1x2x1,2x2x1.")
@option("--network", help="Another network: its dims, as 440-6x2048-8806.")
@option("--minibatch-size", type=int, help="Another minibatch size.")
@option("--averaging-period", type=int, help="Another averaging period, in minibatches.")
@option("--frames", type=float, help="Another number of frames in an epoch.")
@option("--hours", type=float, help="The same in hours of speech, at 100 frames per second.")
@option("--fit", callback=parse_sizes, help="Fit to these sizes only, and predict the others.  [default: all]")
@option("--latency", type=float, help="Seconds for a message, instead of the fitted value.")
@option("--bandwidth", type=float, help="Bytes per second, instead of the fitted value.")
@option("--comm-dtype", type=Choice(["float32", "bfloat16"]), help="Type that is sent.  [default: as measured]")
@option("--allow-overloaded", is_flag=True, help="Predict even from runs whose cores other processes used.")
@option("--out", type=PATH, help="Folder for scaling.png; needs ddnn[report].")
@json_option
def scale(measured: str, out: Path | None, json_: bool, **options: Any) -> None:
    """Predict the speed-up of more workers from measured runs."""
    from ddnn.report import scale_command

    paths = [Path(part) for part in measured.split(",")]
    print_result(scale_command.scale(paths, scale_command.ScaleOptions(**options), out), json_)
