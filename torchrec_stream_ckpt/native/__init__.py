"""A small library in C that gathers, places and sums rows. Everything works without it, more slowly."""
