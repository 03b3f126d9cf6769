"""Attacks on training, one module each, which ``soak.py`` chooses by name.

Each module has ``attack(count, seed)``, which returns its figures by name, and ``BOUNDS``: the
largest value of each figure that counts what must not happen.
"""
