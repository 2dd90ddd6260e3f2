"""Runs side by side: an HTML page, and figures for papers."""
