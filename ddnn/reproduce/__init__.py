"""The tables of arXiv 1507.01239, trained again on a corpus of one's own: which runs, and what came of them."""
