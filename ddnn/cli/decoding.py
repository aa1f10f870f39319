"""`ddnn decode-prep`, `score`, `export` and `import-nnet1`."""

from __future__ import annotations

from pathlib import Path

import click

from ddnn.cli.options import PATH, device_option, json_option, parse_numbers, pipes_option, show_json


@click.command("decode-prep")
@click.argument("run_dir", type=PATH)
@click.option("--data", type=PATH, required=True, help="Kaldi data dir to decode.")
@click.option(
    "--out", type=PATH, required=True, help="Folder for loglikes.ark, loglikes.scp, the counts and decode.sh."
)
@click.option(
    "--prior-scale", type=float, default=1.0, show_default=True, help="Scale of the log-priors that are subtracted."
)
@device_option
@pipes_option
def decode_prep(run_dir: Path, data: Path, out: Path, prior_scale: float, device: str, allow_pipes: bool) -> None:
    """Write log-likelihoods that a Kaldi decoder reads."""
    from ddnn.decoding.prepare import prepare_decoding

    prepare_decoding(run_dir, data, out, device=device, prior_scale=prior_scale, allow_pipes=allow_pipes)


@click.command(
    epilog="""\b
    Example:
      ddnn score exp/an4/decode --graph graph --model ali/final.mdl --text test/text --acoustic-scale 0.07,0.1"""
)
@click.argument("loglikes", type=PATH)
@click.option("--graph", type=PATH, required=True, help="Kaldi graph dir: HCLG.fst and words.txt.")
@click.option("--model", type=PATH, required=True, help="The final.mdl that the graph was made with.")
@click.option("--text", type=PATH, required=True, help="The reference: a Kaldi text of the same utterances.")
@click.option(
    "--acoustic-scale", default="0.05,0.07,0.1,0.143", show_default=True, help="One or more, with commas between."
)
@click.option("--beam", type=float, help="Decoding beam.  [default: 13]")
@click.option("--per-utterance", is_flag=True, help="Show the words of each utterance at the best scale.")
@json_option
def score(
    loglikes: Path, graph: Path, model: Path, text: Path, acoustic_scale: str, beam: float | None, per_utterance: bool,
    json_: bool,
) -> None:  # fmt: skip
    """Compute word error rates without Kaldi; needs ddnn[decode]."""
    from ddnn.decoding import scoring
    from ddnn.decoding.decoder import DecodeOptions

    scales = parse_numbers(acoustic_scale, "--acoustic-scale")
    options = DecodeOptions(scales) if beam is None else DecodeOptions(scales, beam=beam)
    result = scoring.score(loglikes, graph_dir=graph, model=model, text=text, options=options)
    if json_:
        show_json(scoring.as_json(result, alignments=per_utterance))
    else:
        click.echo(scoring.render_text(result, alignments=per_utterance), nl=False)


@click.command()
@click.argument("run_dir", type=PATH)
@click.option("--format", "format_", type=click.Choice(["nnet1"]), default="nnet1", help="Only nnet1 so far.")
@click.option("--out", type=PATH, required=True, help="Folder for final.nnet and feature_transform.nnet.")
def export(run_dir: Path, format_: str, out: Path) -> None:
    """Write a trained network as Kaldi nnet1 files."""
    from ddnn.training.nnet1_command import export_nnet1

    export_nnet1(run_dir, out)


@click.command("import-nnet1")
@click.argument("nnet", type=PATH)
@click.option("--feature-transform", type=PATH, help="nnet1 file of splice, shift and scale before the network.")
@click.option("--pdf-counts", type=PATH, help="nnet1's ali_train_pdf.counts; decode-prep needs them.")
@click.option("--out", type=PATH, required=True, help="Run dir to create.")
def import_nnet1(nnet: Path, feature_transform: Path | None, pdf_counts: Path | None, out: Path) -> None:
    """Create a run dir from a Kaldi nnet1 network."""
    from ddnn.training import nnet1_command

    nnet1_command.import_nnet1(nnet, feature_transform, out, pdf_counts)


COMMANDS = (decode_prep, score, export, import_nnet1)
