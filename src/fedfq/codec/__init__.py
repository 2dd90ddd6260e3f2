"""Arrays in, bytes out: numpy and numba only, nothing of torch, training or Flower."""
