"""What a path is, and how a run is doing."""
