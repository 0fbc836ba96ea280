"""Build torch_magi. The package list and metadata are in pyproject.toml."""

from setuptools import setup

setup()
