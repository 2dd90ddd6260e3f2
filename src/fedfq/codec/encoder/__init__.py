"""What is sent: quantisers, bases, and the search for a step. All of it may change without a new format version."""
