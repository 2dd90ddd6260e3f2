"""The payload format: everything that docs/FORMAT.md specifies, and nothing else.

Nothing here may change what existing bytes decode to. Nothing here imports `fedfq.codec.encoder`.
"""
