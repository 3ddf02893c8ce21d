"""A marker into a model that has changed: what was declared, and what becomes of each table and entry. No torch."""
