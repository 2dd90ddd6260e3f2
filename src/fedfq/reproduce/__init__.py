"""The paper's Tables 1 and 2 and its learning curves, run again with real bytes."""
