"""Model averaging: strategies, and when they are called."""
