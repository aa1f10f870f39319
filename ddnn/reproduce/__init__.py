"""The tables of arXiv 1507.01239 on another corpus: the runs that they need, their records, comparison and report."""
