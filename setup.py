"""Maps the top-level folders onto one import package: common/ -> xpu_ports.common, and so on."""

from setuptools import find_packages, setup

FOLDERS = ("cli", "common", "models", "quant")

setup(
    package_dir={f"xpu_ports.{folder}": folder for folder in FOLDERS},
    packages=[
        f"xpu_ports.{package}"
        for folder in FOLDERS
        for package in (folder, *(f"{folder}.{name}" for name in find_packages(folder)))
    ],
)
