"""For tools that call it; everything is said in pyproject.toml."""

from setuptools import setup

setup()
