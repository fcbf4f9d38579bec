"""Integrations with frameworks, one module for each framework; this module imports none of them.

Responsible for refusing framework versions that an integration does not support.
"""

from __future__ import annotations

import importlib.metadata

from torch.torch_version import TorchVersion


def require(package: str, at_least: str, below: str, module: str) -> str:
    """Returns the installed version of a framework, after checking that it is supported.

    Args:
        package: the distribution's name on PyPI.
        at_least, below: the versions supported: at_least <= version < below.
        module: the integration's name for the message, such as "fastckpt.integrations.lightning".

    Raises:
        ImportError: the framework is missing, too old or too new.
    """
    supported = f"{module} needs {package} >= {at_least}, < {below}"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"{supported}, which is not installed: pip install '{package}>={at_least},<{below}'"
        ) from None
    if not at_least <= TorchVersion(version) < below:
        raise ImportError(f"{supported}; {version} is installed")
    return version
