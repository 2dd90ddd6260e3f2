"""SimpleCNN on CIFAR-10 with Flower. All of it is in `fedfq.flower.app`: read that to write your own."""

from fedfq.flower import app

client = app.client
server = app.server
