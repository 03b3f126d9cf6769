import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+?)"', (here / "pyro_sde/__init__.py").read_text())
assert version is not None

plot = ["matplotlib>=3.7"]
arviz = ["arviz>=0.17,<1"]  # from 1 on it has no InferenceData
metrics = ["torchmetrics>=1.4"]
vision = ["torchvision>=0.19"]
docs = ["sphinx>=8.1", "docutils>=0.21", "myst-parser>=4.0", "furo", "sphinx-copybutton"]
docs += ["ziamath", *plot]
test = ["pytest>=7.4", "pytest-cov>=4.1", "pytest-xdist>=3.5", "hypothesis>=6.90"]
test += ["pandas>=2.0", "graphviz>=0.20", *plot, *arviz, *metrics, *vision]

setup(
    name="pyro-sde",
    version=version.group(1),
    description="Stochastic differential equations as Pyro sample sites",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["pyro_sde", "pyro_sde.*"]),
    package_data={"pyro_sde": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.4", "pyro-ppl>=1.9", "torchsde>=0.2.6", "numpy", "tqdm>=4.60"],
    extras_require={
        "plot": plot,
        "arviz": arviz,
        "metrics": metrics,
        "vision": vision,
        "docs": docs,
        "test": test,
        "dev": [*test, "ruff>=0.6", "mypy>=1.11"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
