"""The FedAvg loop of the paper (Eqs. 1-4): sampling, local training, aggregation, the byte ledger, checkpoints."""
