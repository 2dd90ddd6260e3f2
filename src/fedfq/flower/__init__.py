"""Flower: a client mod that sends updates as payloads, and a strategy wrapper that reads them.

client   app = ClientApp(mods=[fedfq_mod()])
server   strategy = Compressed(FedAvg(...))
"""

from fedfq.flower.mod import fedfq_mod
from fedfq.flower.strategy import Compressed

__all__ = ["fedfq_mod", "Compressed"]
