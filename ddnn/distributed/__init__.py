"""Workers: how they start, how they exchange their parameters, how they stop."""
