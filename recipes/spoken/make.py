"""Makes a corpus of read speech as a Kaldi system would leave it, of any size, with espeak-ng instead of people.

    python recipes/spoken/make.py OUT --hours 10

espeak-ng reads the King James Bible in invented voices over noisy, reverberant telephone lines. OUT then has the data dirs `train`
and `test` (40 log mel bands), their alignments `ali` and `ali_test` with `final.mdl`, `cv_speakers.txt`, and `graph` with a bigram.
The same options give the same bytes on x86 CPUs with AVX2, whatever --jobs. Stopped, the same command goes on.
Needs Debian's libespeak-ng1, espeak-ng-data and bible-kjv, and ddnn[report] for SciPy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Both before NumPy is imported. The rounding of OpenBLAS decides between splits of the tree that are equally good: with one kind of
# kernels all x86 CPUs choose the same.
os.environ["OPENBLAS_CORETYPE"] = "Haswell"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each job

import click
from spoken.corpus import Options, synthesize

from ddnn.util.errors import UserError, exit_code, user_message


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--hours", type=click.FloatRange(0.01, 1000), default=10.0, help="Training speech.")
@click.option(
    "--speakers",
    type=click.IntRange(2, 9999),
    default=None,
    show_default="20 plus 20 per hour, at most 300",
    help="Training speakers; a fifteenth are named in cv_speakers.txt.",
)
@click.option(
    "--test-hours", type=click.FloatRange(0.01, 20), default=1.0, help="Test speech, of other speakers and clauses."
)
@click.option("--test-speakers", type=click.IntRange(1, 9999), default=40, help="Speakers of the test set.")
@click.option(
    "--voices", type=click.IntRange(0), default=0, show_default="one a speaker", help="Number of different voices."
)
@click.option("--pdfs", type=click.IntRange(200, 20000), default=2000, help="Senones, at most.")
@click.option("--snr", type=float, default=24.0, help="Mean signal-to-noise ratio in dB.")
@click.option(
    "--reverb",
    type=click.FloatRange(0, 10),
    default=0.3,
    help="Maximum ratio of reverberant to direct energy, drawn per speaker.",
)
@click.option(
    "--tilt", type=click.FloatRange(0, 20), default=4.0, help="Standard deviation of a speaker's equalizer in dB."
)
@click.option("--warp", type=click.FloatRange(0, 0.3), default=0.06, help="How much the speed of the tape drifts.")
@click.option(
    "--prosody",
    type=click.FloatRange(0, 0.5),
    default=0.18,
    help="How much rate, pitch and volume vary within an utterance.",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(100),
    default=3000,
    help="Read only clauses of this many most frequent words.",
)
@click.option("--seed", type=click.IntRange(0), default=1, help="Random seed.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Parallel processes.")
def main(out: Path, jobs: int, speakers: int | None, hours: float, **options: Any) -> None:
    """Make a corpus of read speech in Kaldi's formats with espeak-ng: features, alignments, final.mdl and a graph."""
    try:
        chosen = Options(hours=hours, speakers=speakers or min(300, 20 + round(20 * hours)), **options)
        click.echo(f"{out}: {synthesize(out, chosen, jobs)}")
    except (UserError, OSError) as error:
        click.echo(f"make.py: error: {user_message(error)}", err=True)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
