"""`fedfq bench`: what the software costs and gives, measured beside its peers in one run."""
