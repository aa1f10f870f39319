"""How the parameters move: plain SGD, online natural gradient, Adam, and the schedules of the learning rate."""
