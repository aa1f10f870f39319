"""What trainings came to, side by side, and what more workers would bring: `ddnn report` and `ddnn scale`."""
