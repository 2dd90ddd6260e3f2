"""The real network: Flower's deployment behind shaped links (Tables 3 and 4), and `fedfq plan`."""
