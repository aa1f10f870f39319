"""Files, errors, devices, progress: what every folder uses."""
