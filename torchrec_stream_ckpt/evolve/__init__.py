"""Resolve a marker against a changed model: declared changes, and the outcome of each table and entry. No torch."""
